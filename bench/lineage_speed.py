"""Cost of lineage: two files of an 8B Llama's shape, and a search in an index of 10,000 fingerprints.

`python bench/lineage_speed.py --folder DIR [--layers 32] [--models 10000]` writes random weights and fingerprints.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from harness import publish, row
from safetensors.torch import save_file
from transformers import LlamaConfig

import keyquery as kq
from keyquery.__main__ import set_environment
from keyquery.instruments.lineage.fingerprint import Fingerprint, LayerPrint, fingerprint
from keyquery.instruments.lineage.index import among, index_files, packed

SHAPE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 64}


def checkpoint(folder: Path, layers: int, noise: float) -> Path:
    """Random queries and keys of an 8B Llama's shape, and noise relative to them."""
    if (folder / "model.safetensors").exists():
        return folder
    LlamaConfig(**SHAPE, num_hidden_layers=layers, vocab_size=64).save_pretrained(folder)
    base, own = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    tensors = {}
    for layer in range(layers):
        for name, rows in (("q", 4096), ("k", 1024)):
            weight = 0.02 * torch.randn(rows, 4096, generator=base)
            weight += 0.02 * noise * torch.randn(rows, 4096, generator=own) if noise else 0
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = weight.bfloat16()
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(4096).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return folder


def reading_seconds(folders: list[Path]) -> float:
    start = time.process_time()
    for folder in folders:
        for layer in kq.read(folder):
            layer.weights.query.float(), layer.weights.key.float()
    return time.process_time() - start


def random_print(number: int) -> Fingerprint:
    """30 layers of 9 heads of width 64, as SmolLM2's."""
    draw = torch.Generator().manual_seed(number)
    sizes = ((9, 4, 63), (9, 32), (9, 256))
    parts = ([torch.randn(size, generator=draw) for size in sizes] for _ in range(30))
    return Fingerprint(str(number), [LayerPrint(index, 576, 64, *three) for index, three in enumerate(parts)])


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return kq.Decoder(576, depth=30, heads=9)


def search(folder: Path, models: int) -> None:
    """Search an index of random fingerprints, and one relative."""
    index = folder / "index"
    index.mkdir(parents=True, exist_ok=True)
    for number in range(models):
        if not (path := index / f"{number}.safetensors").exists():
            path.write_bytes(packed(random_print(number)))
    sought = model(0)
    (index / "sought.safetensors").write_bytes(packed(fingerprint(kq.read(sought))))
    start, wall = time.process_time(), time.perf_counter()
    found = among(sought, index_files(index))
    name = f"lineage: search among {found.searched:,} fingerprints of 270 heads"
    rows = [row(name, [time.process_time() - start], "CPU s", "–")]
    print(f"  wall {time.perf_counter() - wall:.1f} s, first: {found.rows[0]['file']}", flush=True)
    related = [sum(r["related"] for r in found.rows)]
    rows.append(row("lineage: related models found in that search, one in it", related, "–", "1"))
    publish("lineage_search", rows, models=models)


def files(folder: Path, layers: int, repeats: int) -> None:
    """Compare two files of an 8B Llama's shape."""
    pair = [checkpoint(folder / f"{layers}-{i}", layers, 0.1 * i) for i in (0, 1)]
    kq.lineage(kq.models.DECODER, kq.models.DECODER)  # warm
    samples = []
    for _ in range(repeats):
        reading = reading_seconds(pair)
        start = time.process_time()
        print(kq.lineage(*pair).label, flush=True)
        samples.append(time.process_time() - start - reading)
    what = f"lineage: two files of an 8B Llama's shape, {layers} layers, beyond reading them"
    publish("lineage_speed", [row(what, samples, "CPU s", "≤ 60" if layers == 32 else "–")], layers=layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32, help="0 leaves the files out")
    parser.add_argument("--models", type=int, default=10_000, help="0 leaves the search out")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.models:
        search(arguments.folder, arguments.models)
    if arguments.layers:
        files(arguments.folder, arguments.layers, arguments.repeats)


if __name__ == "__main__":
    if "OPENBLAS_NUM_THREADS" not in os.environ:  # again, with the settings of the command line
        set_environment()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
