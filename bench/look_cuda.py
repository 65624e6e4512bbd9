"""`look` on a GPU: files with the query and key weights of an 8B and of a 70B model, random, in bfloat16.

    python bench/look_cuda.py                 both, in the page cache; --device cpu, --layers 2 for a trial
    python bench/look_cuda.py --only 8B

Every figure is of a whole call of `kq.look` in a process where CUDA is initialised. The metrics of the 8B-shaped file
are first compared with those of the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import publish, row

import keyquery as kq

SHAPES = {"8B": (4096, 32, 32, 8), "70B": (8192, 80, 64, 8)}  # width, layers, heads, key heads
REPEATS = {"8B": 3, "70B": 1}
GOALS = {"8B": 4, "70B": 20}
CORE = 1e-9  # largest difference between devices of what comes from the float64 core, relative to the largest value


def write(folder: Path, width: int, layers: int, heads: int, shared: int, device: str) -> None:
    """A checkpoint that holds query and key weights, and the norms before them, and nothing else."""
    rows = {"self_attn.q_proj": width, "self_attn.k_proj": width // heads * shared}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.{role}.weight": (count, width) for role, count in rows.items()}
        shapes[f"{block}.input_layernorm.weight"] = (width,)
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    generator = torch.Generator(device).manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator, device=device) / width**0.5
            values = 1 + values if "norm" in name else values
            file.write(values.bfloat16().cpu().view(torch.uint8).numpy().data)
    facts = {"model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": shared, "hidden_size": width}
    (folder / "config.json").write_text(json.dumps({**facts, "rope_theta": 500000.0}))


def numbers(cell: Any, key: str = "") -> Iterator[tuple[str, list[float]]]:
    """Every metric of a head or layer by its name, spectra as lists."""
    if isinstance(cell, dict):
        for name, part in cell.items():
            yield from numbers(part, name)
    elif isinstance(cell, float):
        yield key, [cell]
    elif isinstance(cell, list) and cell and all(isinstance(value, float) for value in cell):
        yield key, cell


def differences(first: kq.Look, second: kq.Look) -> dict[str, float]:
    """The largest difference of each metric, relative to the largest value of the head."""
    worst: dict[str, float] = {}
    for a, b in zip(first.heads, second.heads, strict=True):
        for (name, own), (_, other) in zip(numbers(a), numbers(b), strict=True):
            apart = max(abs(x - y) for x, y in zip(own, other, strict=True))
            worst[name] = max(worst.get(name, 0.0), apart / max(max(map(abs, own)), 1e-30))
    return worst


def peak() -> float:
    """The process's peak memory so far, in GB, without what a GPU holds."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def measure(folder: Path, name: str, device: str) -> list[dict[str, Any]]:
    times = []
    kq.look(folder, layers=[0], device=device)
    for _ in range(REPEATS[name]):
        gc.collect()
        start = time.perf_counter()
        reading = kq.look(folder, device=device)
        times.append(time.perf_counter() - start)
    what = f"look at query and key weights of {name} shape on an H200"
    rows = [row(f"{what}, file in the page cache", times, "s", f"≤ {GOALS[name]} s")]
    if name == "8B":
        for suffix in (".json", ".json.xz"):
            size = len(reading.content(f"look{suffix}")) / 1e6
            rows.append(row(f"the look at {len(reading.heads):,} heads of 8B shape as {suffix}", [size], "MB", "—"))
    if name == "70B":
        rows.append(row(f"{what}: peak host memory", [peak()], "GB", "≤ 4 GB"))
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", choices=SHAPES)
    options.add_argument("--device", default="cuda")
    options.add_argument("--layers", type=int, help="as many of each model")
    options.add_argument("--folder", type=Path, help="where the files are written. Default: a temporary folder")
    options.add_argument("--no-publish", action="store_true")
    given = options.parse_args()
    if given.device == "cuda":
        torch.ones(1, device="cuda").double() @ torch.ones(1, device="cuda").double()
    rows: list[dict[str, Any]] = []
    for name, (width, layers, heads, shared) in SHAPES.items():
        if given.only not in (None, name):
            continue
        folder = Path(tempfile.mkdtemp(dir=given.folder))
        try:
            write(folder, width, given.layers or layers, heads, shared, given.device)
            rows += measure(folder, name, given.device)
            if name == "8B":
                few = range(min(4, given.layers or layers))
                cpu, gpu = (kq.look(folder, device=on, layers=few, workers=16) for on in ("cpu", given.device))
                apart = differences(cpu, gpu)
                print({key: f"{value:.1e}" for key, value in sorted(apart.items(), key=lambda item: -item[1])})
                exact = max(apart.values())
                assert exact <= CORE, f"devices differ by {exact:.1e}"
                rows.append(
                    row("the same metrics by CPU and by GPU: largest relative difference", [exact], "", "≤ 1e-9")
                )
        finally:
            shutil.rmtree(folder)
    if not given.no_publish:
        publish("look_cuda", rows, device=torch.cuda.get_device_name() if given.device == "cuda" else "cpu")


if __name__ == "__main__":
    main()
