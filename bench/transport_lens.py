"""kq.TransportLens: what following a module adds to training; run by bench/transport.py.

An encoder (width 128, depth 4, 4 heads) learns to tell classes of sequences of 32 vectors: 128 steps an epoch, 16
sequences a step. The lens keeps 2,000 of the points that the last block gives for 64 sequences. Turns alternate: an
epoch alone, an epoch with a record at its end, on copies of one model; one thread, CPU seconds. What a record takes is
also timed by itself, over the epoch beside it: differences of epochs are within the noise of a shared machine.
"""

from __future__ import annotations

import copy
import time

import torch
from harness import publish, row
from torch import nn

import keyquery as kq

SEED, TURNS = 0, 9
STEPS, BATCH, TOKENS, WIDTH, PROBE = 128, 16, 32, 128, 64
EVERY = 50


class Model(nn.Module):
    """Vectors in, two classes out."""

    def __init__(self):
        super().__init__()
        self.enter, self.body, self.out = nn.Linear(8, WIDTH), kq.Encoder(WIDTH, depth=4, heads=4), nn.Linear(WIDTH, 2)

    def forward(self, x):
        """Logits."""
        return self.out(self.body(self.enter(x)).mean(1))


def epoch(model, optimiser, x, y):
    for one, label in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(one), label).backward()
        optimiser.step()


def timed(work, *given):
    start = time.process_time()
    work(*given)
    return time.process_time() - start


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    y = torch.randint(2, (STEPS * BATCH,))
    x = torch.randn(len(y), TOKENS, 8) + y[:, None, None]
    plain = Model()
    watched = copy.deepcopy(plain)
    lens = kq.TransportLens(watched, "body.blocks.3", inputs=x[:PROBE], labels=y[:PROBE])
    optimisers = [torch.optim.AdamW(model.parameters(), 1e-3) for model in (plain, watched)]
    alone, beside, record = [], [], []
    for turn in range(TURNS + 1):
        first = timed(epoch, plain, optimisers[0], x, y)
        second, third = timed(epoch, watched, optimisers[1], x, y), timed(lens.step)
        if turn:  # the first warms up
            alone.append(first)
            beside.append(second + third)
            record.append(third)
    shares = [100 * one / whole for one, whole in zip(record, alone, strict=True)]
    what = f"{STEPS} steps an epoch, {PROBE} sequences followed, CPU"
    rows = [
        row(f"lens: a record an epoch, of the time of an epoch ({what})", shares, "%", "≤ 5 %"),
        row(
            f"lens: a record every {EVERY} steps, of the time of these steps",
            [share * STEPS / EVERY for share in shares],
            "%",
            "≤ 5 %",
        ),
        row(
            "lens: an epoch with a record over one without",
            [one / other for one, other in zip(beside, alone, strict=True)],
            "×",
            "≤ 1.05 ×",
        ),
    ]
    start = time.process_time()
    reading = lens.reading()
    taken = [time.process_time() - start]
    rows.append(
        row(f"lens: its reading, {len(reading.steps)} couplings of 2 classes of 1,000 points", taken, "CPU s", "—")
    )
    publish("transport_lens", rows, seed=SEED, turns=TURNS, batch=BATCH, tokens=TOKENS, width=WIDTH, every=EVERY)


if __name__ == "__main__":
    main()
