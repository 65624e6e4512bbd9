"""What a monitor costs: a training step with it over one without, its maxima against float64, and its memory by length.

On a GPU: a RoPE language model of 125 million parameters, sequences of 4,096 tokens, bfloat16 autocast; on the CPU a
small one in float32. Blocks of steps (on the CPU single steps) with and without the monitor alternate in one run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from harness import publish, row, seconds

import keyquery as kq
from keyquery.instruments.monitor.statistics import LARGEST, logit_statistics
from keyquery.layers import LanguageModel, Shape

LARGE = {"vocab_size": 50304, "width": 768, "depth": 12, "num_attention_heads": 12}
SMALL = {"vocab_size": 1024, "width": 128, "depth": 4, "num_attention_heads": 4}
BLOCK = 50  # steps
WARM = 50  # steps before any is timed
UNRESOLVED = " (not resolved: steps vary by more)"  # a cost cannot be below 0
RANK, HEADS = 64, 12


def trainer(device: str, batch: int, length: int):
    """A model, and a function that makes one training step."""
    torch.manual_seed(0)
    model = LanguageModel(Shape(causal=True, rope=True, length=length, **(LARGE if device == "cuda" else SMALL)))
    model = model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    ids = torch.randint(model.config.vocab_size, (batch, length + 1), device=device)

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return model, step


def overheads(device: str, batch: int, length: int, rounds: int, block: int, seconds_left: float):
    """Share of a step that the monitor adds, by `every`: each block with it stands between two without.

    Ranks and shares, which every tenth record measures, are timed apart; a tenth of their cost is added to a record.
    """
    model, step = trainer(device, batch, length)
    for _ in range(WARM):
        step()
    until = time.perf_counter() + seconds_left
    plain, whole = (kq.Monitor(model, every=1, structure=n, strict=True, on_alarm=ignore) for n in (10**9, 1))
    for monitor in (plain, whole):
        with monitor:
            for _ in range(2):
                step()  # compiles kernels
    extra = max(_step(whole, step, device) - _step(plain, step, device), 0.0) / 10
    watching = {
        every: kq.Monitor(model, every=every, structure=10**9, strict=True, on_alarm=ignore) for every in (10, 50)
    }
    found: dict[int, list[float]] = {every: [] for every in watching}
    before = seconds(step, block, device)
    for at in range(rounds):
        for every, shares in found.items():
            with watching[every]:
                with_it = seconds(step, block, device) + extra / every
            after = seconds(step, block, device)
            shares.append(100 * (2 * with_it / (before + after) - 1))
            before = after
        if time.perf_counter() > until and at >= 2:
            break
    return found, before, extra


def cpu_overheads(batch: int, length: int, rounds: int):
    """The same on a CPU, where whole blocks vary by more than a record costs: of steps recorded and not, in turn.

    A record's cost is the difference of the medians, and is spread over `every` steps.
    """
    model, step = trainer("cpu", batch, length)
    monitor = kq.Monitor(model, every=2, structure=10**9, strict=True, on_alarm=ignore)
    whole = kq.Monitor(model, every=2, structure=1, strict=True, on_alarm=ignore)
    found: dict[int, list[float]] = {10: [], 50: []}
    plain, extra = 0.0, 0.0
    for _ in range(rounds):
        medians = []
        for watching in (monitor, whole):
            with watching:
                times = [seconds(step, 1, "cpu") for _ in range(40)]
            medians.append([statistics.median(times[first::2]) for first in (0, 1)])
        (recorded, plain), (with_ranks, beside) = medians
        extra = max((with_ranks - beside) - (recorded - plain), 0.0) / 10
        for every, shares in found.items():
            shares.append(100 * (recorded - plain + extra) / (every * plain))
    return found, plain, extra


def _step(monitor: kq.Monitor, step, device: str) -> float:
    """Seconds of a step that is recorded, the median of several."""
    with monitor:
        return statistics.median(seconds(step, 1, device) for _ in range(5))


def ignore(alarm) -> None:
    """No line per alarm."""


def exactness(device: str):
    """The largest relative error of maxima against float64."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key = (torch.randn(2, HEADS, 2048, RANK, device=device).to(dtype) * 4 for _ in range(2))
    found = logit_statistics(query, key, RANK**-0.5, causal=True)[LARGEST].double()
    hidden = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
    truth = torch.stack(
        [
            (query[:, head].double() @ key[:, head].double().mT * RANK**-0.5).masked_fill(hidden, -torch.inf).max()
            for head in range(HEADS)
        ]
    )
    return float(((found - truth) / truth).abs().max())


def memory(n: int):
    """Bytes beyond the queries and keys of n tokens, at the peak."""
    query, key = (torch.randn(1, HEADS, n, RANK, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    logit_statistics(query, key, RANK**-0.5, causal=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--seconds", type=float, default=15, help="after which no round is begun, of each size")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where, name = ("H200", torch.cuda.get_device_name()) if device == "cuda" else ("CPU", "cpu")
    rows = [row(f"largest logits against float64, relative error, {where}", [exactness(device)], "", "1e-5")]
    if device == "cuda":
        short, long = memory(4096), memory(32768)
        rows.append(row("memory of logit statistics, 32,768 over 4,096 tokens, H200", [long / short], "times", "8"))
        rows.append(row("memory of logit statistics, 12 heads, 32,768 tokens, H200", [long / 2**20], "MiB", "–"))
    for batch, length in ((1, 4096), (4, 4096)) if device == "cuda" else ((8, 128),):
        if device == "cuda":
            found, step, extra = overheads(device, batch, length, options.rounds, options.block, options.seconds)
        else:
            found, step, extra = cpu_overheads(batch, length, options.rounds)
        print(
            f"step of {batch} × {length} tokens: {1e3 * step:.1f} ms; ranks and shares: {1e4 * extra:.1f} ms",
            flush=True,
        )
        size = f"{batch} × {length:,} tokens, {where}"
        for every, goal in ((50, "1"), (10, "5")):
            what = f"monitor at every={every} over a training step, {size}"
            what += UNRESOLVED if min(found[every]) < -float(goal) else ""
            rows.append(row(what, found[every], "% more", goal))
        publish(f"monitor_{device}", rows, device=name)


if __name__ == "__main__":
    main()
