"""The size of a stored look, and the time to open it: random weights of GPT-2 small's shape, 144 heads.

Opening is the CPU time of the first `Reading.load` of a process, after `import torch` and `import keyquery`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from harness import publish, row
from look import gpt2

import keyquery as kq

REPEATS = 3
OPEN = """
import sys, time, torch, keyquery as kq
start = time.process_time()
reading = kq.Reading.load(sys.argv[1])
print(time.process_time() - start)
assert len(reading.heads) == 144
"""


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        gpt2(folder)
        reading = kq.look(folder)
        for suffix, goal in ((".json", "—"), (".json.xz", "≤ 1 MB")):
            file = folder / f"look{suffix}"
            reading.save(file)
            assert kq.Reading.load(file) == reading, suffix
            size = file.stat().st_size / 1e6
            rows.append(row(f"look at 144 heads stored as {suffix}", [size], "MB", goal))
            runs = (
                subprocess.run([sys.executable, "-c", OPEN, str(file)], capture_output=True, text=True, check=True)
                for _ in range(REPEATS)
            )
            rows.append(
                row(
                    f"opening it as {suffix}, after `import torch`",
                    [float(run.stdout) for run in runs],
                    "CPU s",
                    "≤ 0.2 CPU s",
                )
            )
    publish("readings", rows)


if __name__ == "__main__":
    main()
