"""kq.TransportClassifier against a Transformer: CPU time of a fit, in one run; run by bench/transport.py.

The Transformer is that of the study of transport: a kq.Encoder of one block, 10 heads of width 16, AdamW at 3e-3, at
most 200 epochs. Both hold a fifth out and stop after 20 epochs without a better one. Three sets: two Gaussian classes
whose points are 2 apart and have covariance 2I, 400 rows; the same as 400 sequences of 20 steps; breast cancer of
scikit-learn, seven tenths of it. A turn is a seed: data, both fits, and accuracies on what neither has seen. The
Transformer is timed a second time only until it first is as accurate as the other on the test data, the time of looking
left out: no real training can stop so early. One thread.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from harness import publish, row

from keyquery.estimators.base import hold_out, seeded
from keyquery.estimators.fitting import epochs_of
from keyquery.estimators.sequences import statistics
from keyquery.studies.rivals import HELD_OUT, STEPS, Labelled, Transformer, class_loss, learn, recipe_of, standardised
from keyquery.studies.tables import simulated, split_of
from keyquery.training import train

TURNS = 7
SETS = {"400 rows": (400, 1), "400 sequences of 20 steps": (400, 20), "breast cancer": None}


def data_of(name, seed):
    """What is learned from, and what is tested on."""
    if SETS[name] is None:
        return split_of(name, seed, Path())
    count, steps = SETS[name]
    return *simulated(2, 1, steps, count, seed), *simulated(2, 1, steps, 4000, 1000 + seed)


def fitted(method, data, seed):
    """CPU seconds and accuracy."""
    start = time.process_time()
    learned = learn(method, data[0], data[1], seed, "cpu")
    seconds = time.process_time() - start
    return seconds, float((learned.predict(data[2]) == data[3]).mean())


def until(data, goal, seed):
    """CPU seconds of training until a Transformer first has this accuracy on the test data, or stops for good."""
    x, y, test_x, test_y = data
    learned, held = hold_out(y, HELD_OUT, seed)
    mean, scale = statistics(list(x[learned].astype(np.float64)))
    samples = Labelled(standardised(x, mean, scale), torch.from_numpy(y))
    points, checked, test = samples.take(learned), samples.take(held), standardised(test_x, mean, scale)
    draw, every = epochs_of(points.take, len(points.y), -(-len(points.y) // STEPS), seed)
    spent = [0.0]
    start = [time.process_time()]

    @torch.no_grad()
    def good(step):
        if step == 0 or step % every:
            return False
        spent[0] += time.process_time() - start[0]
        network.eval()
        found = torch.cat([network(part).argmax(1) for part in test.split(500)]).numpy()
        network.train()
        start[0] = time.process_time()
        return float((found == test_y).mean()) >= goal

    with seeded(seed, "cpu"):
        network = Transformer("transformer", x.shape[2], int(y.max()) + 1)
        recipe = recipe_of("transformer", every, seed)
        train(network, draw, class_loss, recipe, validate=lambda m: float(class_loss(m, checked)), until=good)
    return spent[0]


def main():
    torch.set_num_threads(1)
    rows = []
    for name in SETS:
        few = [part[:60] for part in data_of(name, 0)]
        for method in ("ot", "transformer"):
            learn(method, few[0], few[1], 0, "cpu", epochs=1)
        turns = []
        for seed in range(TURNS):
            data = data_of(name, seed)
            ours, other = (fitted(method, data, seed) for method in ("ot", "transformer"))
            turns.append((*ours, *other, until(data, ours[1], seed)))
        seconds, accuracy, theirs, reached, soonest = map(np.array, zip(*turns, strict=True))
        of = f"transport classifier, {name}"
        rows += [
            row(f"{of}: to fit it", seconds.tolist(), "CPU s", "—"),
            row(f"{of}: how many times less CPU time than a Transformer", (theirs / seconds).tolist(), "×", "≥ 5 ×"),
            row(f"{of}: the same, Transformer stopped when as accurate", (soonest / seconds).tolist(), "×", "—"),
            row(f"{of}: accuracy less the Transformer's", (100 * (accuracy - reached)).tolist(), "points", "—"),
        ]
    publish("transport_fit", rows, turns=TURNS)
