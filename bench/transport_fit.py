"""kq.TransportClassifier against a Transformer: CPU time of a fit, in one run; run by bench/transport.py.

The Transformer is that of the study of transport: a kq.Encoder of one block, 10 heads of width 16, AdamW at 3e-3, at
most 200 epochs. Both hold a fifth out and stop after 20 epochs without a better one. Three sets: two Gaussian classes
whose points are 2 apart and have covariance 2I, 400 rows; the same as 400 sequences of 20 steps; breast cancer of
scikit-learn, seven tenths of it. A turn is a seed: data, both fits, and accuracies on what neither has seen. Both
are then timed a second time, only until they first have the lower of the two accuracies on the test data, the time of
looking left out: no real training can know when to stop so early. One thread.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import numpy as np
import torch
from harness import publish, row
from keyquery_studies.transport.baselines import (
    HELD_OUT,
    STEPS,
    Labelled,
    Transformer,
    class_loss,
    learn,
    recipe_of,
    standardised,
)
from keyquery_studies.transport.datasets import simulated, split_of

from keyquery import TransportClassifier
from keyquery.learn.base import hold_out, seeded
from keyquery.learn.inputs.sequences import statistics
from keyquery.learn.series.training import epochs_of
from keyquery.learn.training import train
from keyquery.learn.transport.alignment import align, map_loss

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


def until(method, data, goal, seed):
    """CPU seconds of a training until it first has this accuracy on the test data, or stops for good."""
    x, y, test_x, test_y = data
    learned, held = hold_out(y, HELD_OUT, seed)
    mean, scale = statistics(list(x[learned].astype(np.float64)))
    whole = Labelled(standardised(x, mean, scale), torch.from_numpy(y))
    points, checked, test = whole.take(learned), whole.take(held), standardised(test_x, mean, scale)
    sizes, steps = (x.shape[2], int(y.max()) + 1), x.shape[1]
    start, spent = [time.process_time()], [0.0]
    with seeded(seed, "cpu"):
        if method == "ot":
            network = TransportClassifier("circle")._network(*sizes)
            points, checked = (_aligned(part, steps, how, seed) for part, how in ((points, "ot"), (checked, "mean")))
            loss, recipe = map_loss, "perceptron"  # its optimiser, rate and epochs are those of the classifier
        else:
            network, loss, recipe = Transformer("transformer", *sizes), class_loss, "transformer"
        count = len(points[0])
        draw, every = epochs_of(points.take, count, -(-count // STEPS), seed)

        @torch.no_grad()
        def good(step):
            if step == 0 or step % every:
                return False
            spent[0] += time.process_time() - start[0]
            network.eval()
            if method == "ot":
                scores = [
                    -network.distances(part.flatten(0, 1)).view(len(part), steps, -1).sum(1) for part in test.split(500)
                ]
            else:
                scores = [network(part) for part in test.split(500)]
            network.train()
            found = torch.cat(scores).argmax(1).numpy()
            start[0] = time.process_time()
            return float((found == test_y).mean()) >= goal

        plan = recipe_of(recipe, every, seed)
        train(network, draw, loss, plan, validate=lambda model: float(loss(model, checked)), until=good)
    return spent[0]


def _aligned(part, steps, how, seed):
    x, y = part.x.flatten(0, 1), part.y.repeat_interleave(steps)
    return align(x.double(), y, max(x.shape[1], 2), how, seed).to("cpu")


def main():
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a class of")  # that is matched in mini-batches, as 20 steps a sequence are
    rows = []
    for name in SETS:
        few = [part[:60] for part in data_of(name, 0)]
        for method in ("ot", "transformer"):
            learn(method, few[0], few[1], 0, "cpu", epochs=1)
        turns = []
        for seed in range(TURNS):
            data = data_of(name, seed)
            ours, other = (fitted(method, data, seed) for method in ("ot", "transformer"))
            goal = min(ours[1], other[1])
            turns.append((*ours, *other, *(until(method, data, goal, seed) for method in ("ot", "transformer"))))
        seconds, accuracy, theirs, reached, first, second = map(np.array, zip(*turns, strict=True))
        of = f"transport classifier, {name}"
        rows += [
            {**row(f"{of}: to fit it", seconds.tolist(), "CPU s", "—"), "shown": False},
            row(f"{of}: how many times less CPU time than a Transformer", (theirs / seconds).tolist(), "×", "≥ 5 ×"),
            row(f"{of}: the same, both stopped when they first are as accurate", (second / first).tolist(), "×", "—"),
            {
                **row(f"{of}: accuracy less the Transformer's", (100 * (accuracy - reached)).tolist(), "points", "—"),
                "shown": False,
            },
        ]
    publish("transport_fit", rows, turns=TURNS)
