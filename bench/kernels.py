"""Small benchmarks in one table: imports, flow, co-occurrence counts, time encodings, and a thousand looks.

- import: wall seconds that `import keyquery` adds to `import torch`, of fresh processes in turn
- flow: peak memory of 24 layers, 16 heads and 1,024 tokens (BertModel) beside the model's own run
- words: counting pairs of a million words drawn by Zipf's law
- time: a million timestamps encoded
- soak: a thousand looks in one process, each written as JSON and as a page, and loaded again

    python bench/kernels.py [--part import]       ten minutes on one core
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from harness import cpu_seconds, publish, row
from safetensors.torch import save_file

import keyquery as kq
from keyquery.pages.document import page

LOOKS, FIRST, EVERY = 1000, 50, 10
LAYERS, HEADS, TOKENS, WIDTH = 24, 16, 1024, 256
IMPORT = "import time; start = time.perf_counter(); import {0}; {0}.{1}; print(time.perf_counter() - start)"
FLOW = f"""
import sys, torch, transformers, keyquery as kq
torch.set_num_threads(1)
shape = dict(hidden_size={WIDTH}, num_hidden_layers={LAYERS}, num_attention_heads={HEADS}, intermediate_size={WIDTH})
config = transformers.BertConfig(**shape, max_position_embeddings={TOKENS}, vocab_size=100)
model, inputs = transformers.BertModel(config).eval(), dict(input_ids=torch.randint(100, (1, {TOKENS})))
with torch.no_grad():
    if sys.argv[1] == "flow":
        kq.flow(model, ["text", "image"] * ({TOKENS} // 2), inputs=inputs)
    else:
        model(**inputs)
"""


def imports():
    """Seconds beyond torch; the first of each warms the file cache and writes the bytecode."""
    runs = {}
    for name in 10 * ["torch", "keyquery"]:
        code = IMPORT.format(name, "Tensor" if name == "torch" else "Form")
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        runs.setdefault(name, []).append(float(out))
    base = statistics.median(runs["torch"][1:])
    added = [seconds - base for seconds in runs["keyquery"][1:]]
    return [row("`import keyquery` over `import torch`", added, "s", "< 0.3 s")]


def peak(how):
    """Peak mebibytes of a process."""
    process = subprocess.Popen([sys.executable, "-c", FLOW, how])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{how} failed"
    return usage.ru_maxrss / 1024


def flow():
    plain = min(peak("plain") for _ in range(3))
    what = f"flow: peak memory beside the model's run, {LAYERS} layers, {HEADS} heads, {TOKENS:,} tokens, BertModel"
    one_layer = HEADS * TOKENS**2 * 4 / 2**20
    return [row(what, [peak("flow") - plain for _ in range(3)], "MiB", f"≤ {one_layer:.0f} MiB")]


def words():
    share = 1 / np.arange(1, 1001) ** 1.1
    text = " ".join(f"w{word}" for word in np.random.default_rng(0).choice(1000, 10**6, p=share / share.sum()))
    taken = cpu_seconds(lambda: kq.Cooccurrence.from_text(text, 5), 5)
    return [row("co-occurrence of a million words, window 5, one core", taken, "CPU s", "≤ 5 CPU s")]


@torch.no_grad()
def encodings():
    times, rows = 1.7e9 + 3.15e7 * torch.rand(10_000, 100, dtype=torch.float64), []
    for name, code in (("mercer", kq.MercerTime(64, 4, 8)), ("bochner", kq.BochnerTime(64, "free"))):
        taken = cpu_seconds(lambda: code.eval().encode(times), 5)  # noqa: B023
        rows.append(row(f"a million timestamps as 64 features, {name}, CPU", taken, "s", "—"))
    return rows


def resident():
    """Megabytes that this process holds."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024


def soak():
    """Looks of six sources in turn: bundled models, on text and from weights alone, a file, and a live module."""
    tensors = {f"layers.{i}.self_attn.{r}_proj.weight": torch.randn(64, 64) for i in range(4) for r in "qkvo"}
    on_text = {"text": kq.models.TEXT, "tokens": 256, "length": 32, "sample": 8}
    held, start = [], time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder, "model.safetensors"))
        sources = [
            {"source": kq.models.ENCODER},
            {"source": kq.models.DECODER, "directions": 1},
            {"source": kq.models.ENCODER, **on_text},
            {"source": kq.models.DECODER, **on_text},
            {"source": Path(folder, "model.safetensors"), "heads": 4},
            {"source": torch.nn.TransformerEncoderLayer(64, 4)},
        ]
        for number in range(1, LOOKS + 1):
            reading = kq.look(**sources[number % len(sources)])
            reading.to_json(Path(folder, "look.json"))
            assert kq.Reading.load(Path(folder, "look.json")) == reading
            assert page(reading)
            if number >= FIRST and number % EVERY == 0:
                held.append(resident())
    spent = 1000 * (time.process_time() - start) / LOOKS
    end = f"{LOOKS:,} looks in one process: memory at the end over that after {FIRST}"
    return [
        row(end, [held[-1] / held[0]], "×", "0.95 to 1.05"),
        row(f"{LOOKS:,} looks: most memory over that after {FIRST}", [max(held) / held[0]], "×", "≤ 1.05"),
        row("each look, its JSON and its page", [spent], "ms", "—"),
    ]


PARTS = {"import": imports, "flow": flow, "words": words, "time": encodings, "soak": soak}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="this one alone, printed and not published")
    part = parser.parse_args().part
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for name in [part] if part for row in PARTS[name]()] or [row for of in PARTS.values() for row in of()]
    if part is None:
        publish("kernels", rows, machine="one CPU thread")


if __name__ == "__main__":
    main()
