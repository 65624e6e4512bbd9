"""What `import keyquery` adds to `import torch`, in wall seconds of fresh processes, the two in turn."""

from __future__ import annotations

import statistics
import subprocess
import sys

from harness import publish, row

CODE = "import time; start = time.perf_counter(); import {module}; {module}.{name}; print(time.perf_counter() - start)"


NAMES = {"torch": "Tensor", "keyquery": "Form"}  # names of keyquery are imported when they are first used


def seconds_to_import(module: str) -> float:
    code = CODE.format(module=module, name=NAMES[module])
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(out.stdout)


def main():
    for module in ("torch", "keyquery"):
        seconds_to_import(module)  # warms the file cache and writes the bytecode
    pairs = [(seconds_to_import("torch"), seconds_to_import("keyquery")) for _ in range(9)]
    base = statistics.median(torch for torch, _ in pairs)
    added = [keyquery - base for _, keyquery in pairs]
    publish("import", [row("`import keyquery` over `import torch`", added, "s", "< 0.3 s")])


if __name__ == "__main__":
    main()
