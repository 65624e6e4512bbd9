"""Every kernel of kq.Attention against `general`: forward and backward, side by side in one run.

On a GPU in bfloat16 under torch.compile at 65,536 tokens, else in float32 on one CPU thread at 4,096. Each measurement
stands between two of `general`, and its ratio is to their mean; spreads are from the first to the last decile. Outputs
are compared with float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
from pathlib import Path

import torch
from harness import RESULTS, publish, row, seconds

import keyquery as kq
from keyquery.layers.kernels import KERNELS
from keyquery.testing.kernels import reference

WIDTH, HEADS, SEED = 512, 8, 0


def make(kernel, device):
    torch.manual_seed(SEED)
    return kq.Attention(WIDTH, HEADS, kernel=kernel, device=device)


def check(layer, run, device):
    """Before anything is timed: outputs agree with every score written out in float64."""
    x = torch.randn(2, 128, WIDTH, device=device)
    with torch.no_grad():
        truth = reference(copy.deepcopy(layer).cpu().double(), x.cpu().double(), None, False)
        error = (run(x).cpu().double() - truth).norm() / truth.norm()
    limit = 1e-2 if device == "cuda" else 1e-5
    assert error < limit, f"{layer.kernel} is off by {error:.2g}"


def stepper(layer, run, batch, n, device):
    x = torch.randn(batch, n, WIDTH, device=device, requires_grad=True)
    gradient = torch.randn(batch, n, WIDTH, device=device)
    weights = [x, *layer.parameters()]

    def step():
        torch.autograd.grad(run(x), weights, gradient.to(torch.bfloat16) if device == "cuda" else gradient)

    return step


def measure(tokens, lengths, rounds, times, device, kernels=KERNELS):
    rows = []
    for n in lengths:
        steps = {}
        for kernel in kernels:
            layer = make(kernel, device)
            compiled = torch.compile(layer, fullgraph=True, dynamic=False) if device == "cuda" else layer

            def run(x, compiled=compiled):
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    return compiled(x)

            if n == lengths[0]:
                check(layer, run, device)
            steps[kernel] = stepper(layer, run, tokens // n, n, device)
            for _ in range(3):
                steps[kernel]()
        for kernel in kernels:
            taken, ratios = [], []
            often = max(times * 1024 // n, 1)
            for _ in range(rounds):
                before = seconds(steps["general"], often, device)
                taken.append(seconds(steps[kernel], often, device))
                after = seconds(steps["general"], often, device)
                ratios.append(2 * taken[-1] / (before + after))
            goal = {
                "general": "—",
                "rbf": "≤ 1.1 ×",
                "psd": "≤ 0.97 ×" if device == "cuda" and n == 1024 else "≤ 1 ×",
            }.get(kernel, "≤ 1 ×")
            where = f"{tokens:,} tokens, {n:,} a sequence, {'H200' if device == 'cuda' else 'CPU'}"
            found = row(f"attention `{kernel}` over `general`, {where}", ratios, "×", goal)
            spread = statistics.quantiles(ratios, n=10)
            found |= {"low": spread[0], "high": spread[-1], "milliseconds": 1e3 * statistics.median(taken)}
            rows.append({**found, "shown": device == "cuda" and n == 1024 and kernel != "general"})
        del steps
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the results there")
    parser.add_argument("--only", choices=KERNELS[1:], help="measure one kernel, and keep the results of the others")
    options = parser.parse_args()
    out, kernels = options.out, KERNELS if options.only is None else (KERNELS[0], options.only)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch._dynamo.config.recompile_limit = 100  # all kernels share one forward
        rows = measure(65_536, (1024, 4096, 16_384), rounds=15, times=6, device=device, kernels=kernels)
        name = torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        rows = measure(4096, (256, 1024), rounds=7, times=1, device=device, kernels=kernels)
        name = "one CPU thread"
    counts = {kernel: sum(weight.numel() for weight in make(kernel, "cpu").parameters()) for kernel in KERNELS}
    facts = {"seed": SEED, "width": WIDTH, "heads": HEADS, "machine": name, "parameters": counts}
    if options.only is not None:  # every ratio is to `general` in the same run
        new = {row["what"]: row for row in rows if f"`{options.only}` over" in row["what"]}
        kept = json.loads((RESULTS / f"structured_{device}.json").read_text())["rows"]
        rows = [new.get(row["what"], row) for row in kept]
    publish(f"structured_{device}", rows, **facts)
    if out is not None:
        shutil.copy(RESULTS / f"structured_{device}.json", out)


if __name__ == "__main__":
    main()
