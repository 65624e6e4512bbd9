"""Codes of time: encoding a million timestamps, and what they cost a training of kq.EventModel.

Timestamps are Unix seconds over a year, in sequences of 100, encoded in 64 features; before it is timed, the code is
compared with cosines in exact arithmetic (sums of integers). Training: steps of the network at the default sizes of
kq.EventModel on windows of 80 events of 22 types, forward, backward and update, with Mercer's code, Bochner's, and
positions alone, whose sines are fixed and cost no gradient, in turns; ratios are within a turn. CPU: one thread, CPU
seconds; on a GPU by its own clock.

    python bench/time.py [--out FILE]
"""

from __future__ import annotations

import argparse
import math
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from harness import RESULTS, publish, row, seconds

import keyquery as kq
from keyquery.learn.events.losses import losses
from keyquery.learn.events.network import EventNetwork
from keyquery.learn.events.windows import Clock, cut
from keyquery.learn.inputs.event_streams import stream_of
from keyquery.learn.training.optimisers import make_optimiser

SEED, DIM, TYPES = 0, 64, 22
USUAL = kq.EventModel().get_params()
WINDOW, BATCH = USUAL["window"], USUAL["batch_size"]
CODES = {"mercer": lambda: kq.MercerTime(DIM, 4, 8), "bochner": lambda: kq.BochnerTime(DIM, "free")}


def check():
    """Phases of large times are right to a part in 10⁹, by fractions."""
    code = kq.MercerTime(4, degree=2, periods=[86_400.0])
    times = [1_700_000_000_123, 1_700_031_557_321]  # milliseconds
    given = torch.tensor(times, dtype=torch.float64) / 1000
    turns = [float(Fraction(j * (times[1] - times[0]), 86_400_000) % 1) for j in (1, 2)]
    truth = sum(share * math.cos(2 * math.pi * turn) for share, turn in zip(code.shares().tolist(), turns, strict=True))
    found = code.double().encode(given)
    assert abs(float((found[0] @ found[1]).detach()) - truth) < 1e-9, "codes of time are off"


def encode(device):
    times = 1.7e9 + 3.15e7 * torch.rand(10_000, 100, dtype=torch.float64, device=device)
    rows = []
    for name, make in CODES.items():
        code = make().to(device).eval()
        with torch.no_grad():
            code.encode(times)
            taken = [seconds(lambda code=code: code.encode(times), 1, device) for _ in range(5)]
        rows.append(row(f"a million timestamps as {DIM} features, {name}, {where(device)}", taken, "s", "—"))
    return rows


def step_of(time, device):
    """One step of training, on the same events."""
    rng, users = np.random.default_rng(SEED), BATCH
    events = rng.integers(TYPES, size=users * WINDOW)
    times = rng.exponential(size=users * WINDOW).cumsum()
    stream = stream_of(events, times, np.repeat(np.arange(users), WINDOW))
    windows, _ = cut(stream, events, Clock(1.0), WINDOW, device)
    torch.manual_seed(SEED)
    shape = (USUAL["width"], USUAL["depth"], USUAL["heads"])
    network = EventNetwork(TYPES, *shape, time, USUAL["how"], USUAL["dropout"])
    network.begin(np.bincount(events).astype(float), stream.gaps, windows)
    network.to(device).train()
    batch, optimiser = windows.take(range(len(windows.starts))), make_optimiser("adamw", network, USUAL["lr"], 0.01)

    def step():
        kind, gap, _ = losses(network, batch)
        optimiser.zero_grad(set_to_none=True)
        (kind.mean() + gap.mean()).backward()
        optimiser.step()

    return step


def throughput(device, turns=21):
    steps = {time: step_of(time, device) for time in ("positions", *CODES)}
    taken = {time: [] for time in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(turns):
        for time, step in steps.items():
            taken[time].append(seconds(step, 4, device))
    rows = []
    for time in CODES:
        ratios = [base / own for base, own in zip(taken["positions"], taken[time], strict=True)]
        rows.append(row(f"training steps a second, {time} over positions, {where(device)}", ratios, "×", "≥ 0.9 ×"))
    return rows


def where(device):
    return "H200" if device == "cuda" else "CPU"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the results there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    check()
    rows = [*encode(device), *throughput(device)]
    machine = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    publish(f"time_{device}", rows, seed=SEED, machine=machine, window=WINDOW, batch=BATCH, width=USUAL["width"])
    if options.out is not None:
        shutil.copy(RESULTS / f"time_{device}.json", options.out)


if __name__ == "__main__":
    main()
