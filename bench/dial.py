"""Dialled attention against the plain fused one: time side by side in one run, and how memory grows with length.

Attention alone, without projections: rotated queries and keys in, outputs out, means known (`data=`) unless said. With
rotary positions a dialled query is three times as wide as a plain one, without them twice. On a GPU in bfloat16 at
65,536 tokens, else in float32 on one CPU thread. Each measurement stands between two of the plain one.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from harness import RESULTS, publish, row, seconds

import keyquery as kq

HEADS, RANK, SEED = 16, 64, 0
OFF = {"directional": 0.0}


def inputs(batch, n, device, gradient):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(batch, HEADS, n, RANK, device=device, dtype=dtype, requires_grad=gradient) for _ in range(3)]


def stepper(layer, tensors, gradient):
    def forward():
        return layer._attend(*tensors, None, None, True)[0]

    def step():
        if gradient:
            torch.autograd.grad(forward().sum(), tensors)
        else:
            with torch.no_grad():
                forward()

    return step


def ratios(rope, batch, n, device, rounds, times, gradient=False, data=True):
    """Dialled over plain, several times."""
    torch.manual_seed(SEED)
    layer = kq.Attention(HEADS * RANK, HEADS, rope=rope, device=device).eval()
    step = stepper(layer, inputs(batch, n, device, gradient), gradient)
    batches = [{"x": torch.randn(2, 64, HEADS * RANK)}] if data else None
    found = []
    for turn in range(rounds + 2):
        before = seconds(step, times, device)
        with kq.dial(layer, **OFF, data=batches):
            taken = seconds(step, times, device)
        after = seconds(step, times, device)
        if turn > 1:  # the first two warm up
            found.append(2 * taken / (before + after))
    return found


def peak(rope, n):
    """Bytes that one dialled call takes at most beyond its inputs."""
    layer = kq.Attention(HEADS * RANK, HEADS, rope=rope, device="cuda").eval()
    step = stepper(layer, inputs(1, n, "cuda", False), False)
    with kq.dial(layer, **OFF, data=[{"x": torch.randn(2, 64, HEADS * RANK)}]):
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held


def measure(tokens, lengths, rounds, times, device):
    rows, rope = [], kq.Rope(RANK)
    where = "H200" if device == "cuda" else "CPU"
    cases = [(n, rope, {}, "") for n in lengths] + [(lengths[1], None, {}, ", no rope")]
    cases += [(lengths[1], rope, {"data": False}, ", means of the batch")]
    cases += [(lengths[1], rope, {"gradient": True}, ", with gradients")]
    for n, turned, options, note in cases:
        goal = "≤ 3 ×" if n == 4096 and device == "cuda" and "gradient" not in options else "—"
        found = ratios(turned, max(tokens // n, 1), n, device, rounds, times, **options)
        shown = device == "cuda" and n == 4096 and not note
        what = f"dialled attention over plain, {tokens:,} tokens, {n:,} a sequence, head width {RANK}, {where}{note}"
        rows.append({**row(what, found, "×", goal), "shown": shown})
    if device == "cuda":
        found = ratios(rope, 1, 4096, device, rounds, times)
        rows.append({**row(f"the same, one sequence of 4,096, {where}", found, "×", "≤ 3 ×"), "shown": False})
        grown = [peak(rope, 32_768) / peak(rope, 8192)]
        rows.append(row("memory of dialled attention, 32,768 over 8,192 tokens", grown, "×", "≤ 4 × (linear)"))
        rows[-1]["shown"] = False
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the results there")
    out = parser.parse_args().out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        rows, name = measure(65_536, (1024, 4096, 16_384), 15, 6, device), torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        rows, name = measure(2048, (256, 1024), 5, 1, device), "one CPU thread"
    publish(f"dial_{device}", rows, seed=SEED, heads=HEADS, machine=name, off=OFF)
    if out is not None:
        shutil.copy(RESULTS / f"dial_{device}.json", out)


if __name__ == "__main__":
    main()
