"""For the study `transport`: trajectories of a Transformer's points, and pre-trained heads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.learn.base import seeded
from keyquery.learn.inputs.sequences import statistics
from keyquery.learn.series.training import epochs_of
from keyquery.learn.training import Recipe, train
from keyquery.learn.transport.alignment import centres
from keyquery.learn.transport.lens import TransportLens
from keyquery.learn.transport.transport import transport
from keyquery_studies.common.store import result_name
from keyquery_studies.transport.baselines import STEPS, Labelled, Transformer, class_loss, recipe_of, standardised
from keyquery_studies.transport.datasets import LEARN, TEST, bayes, named, simulated

LENGTH = 20  # steps of a sequence, as published
FIGURES = ("distance", "wasserstein", "optimality", "efficiency", "matched")
STARTS = ("none", "toward", "away", "published")
DRAWN = 100  # synthetic points of a class
FIRST = 500  # steps of pre-training
SEEN = 500  # test sequences that are looked at after every epoch
ENOUGH = 0.95  # of the best accuracy there is: what counts as having converged,
ROW = 3  # in so many epochs, one after the other


class Task:
    """A simulated dataset, standardised: training and test data, and the network at initialisation."""

    def __init__(self, network: str, classes: int, i: int, seed: int, device: str) -> None:
        x, y = simulated(classes, i, LENGTH, LEARN[LENGTH], seed)
        test_x, test_y = simulated(classes, i, LENGTH, TEST[LENGTH], 10_000 + seed)
        mean, scale = statistics(list(x))
        self.samples, self.test = (
            Labelled(standardised(values, mean, scale, device), torch.from_numpy(labels).to(device))
            for values, labels in ((x, y), (test_x, test_y))
        )
        with seeded(seed, device):
            self.model = Transformer(network, 2, classes).to(device)

    @torch.no_grad()
    def accuracy(self, count: int | None = None) -> float:
        """On the test data, or on the first so many sequences of it."""
        was = self.model.training
        self.model.eval()
        parts = zip(self.test.x[:count].split(500), self.test.y[:count].split(500), strict=True)
        right = sum(int((self.model(x).argmax(1) == y).sum()) for x, y in parts)
        self.model.train(was)
        return right / len(self.test.y[:count])


@dataclass(frozen=True, kw_only=True)
class CourseTrial:
    """Train a Transformer, and record the outputs of its block epoch by epoch."""

    network: str
    classes: int
    i: int
    seed: int
    epochs: int = 200

    @property
    def name(self) -> str:
        """The name of its result file."""
        words = ("course", self.network, self.classes, self.i, self.seed)
        return result_name(words, {**asdict(self), "length": LENGTH, "learn": LEARN[LENGTH], "steps": STEPS})

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, and compare the trajectories with optimal transport."""
        task = Task(self.network, self.classes, self.i, self.seed, device)
        draw, every = epochs_of(task.samples.take, LEARN[LENGTH], -(-LEARN[LENGTH] // STEPS), self.seed)
        module = "body" if self.network == "published" else "body.blocks.0"
        lens = TransportLens(task.model, module, inputs=task.samples.x, labels=task.samples.y, points=None, heads=False)

        def follow(step: int, model: nn.Module) -> None:
            if step and step % every == 0:
                lens.step()

        recipe = recipe_of(self.network, every, self.seed, self.epochs, patience=None)
        train(task.model, draw, class_loss, recipe, after=follow)
        path, labels = lens.path(), np.asarray(lens.labels)
        accuracy = {"untrained": self._metrics(path, labels)}
        if self.network == "published":  # it stays among the features, so that the input is a start, too
            inputs = task.samples.x.flatten(0, 1).cpu()
            accuracy["input"] = self._metrics(torch.cat((inputs[None], path[1:])), labels)
            accuracy["before"] = self._metrics(torch.stack((inputs, path[0])), labels)  # what the block does untrained
        return {**asdict(self), "accuracy": task.accuracy(), "starts": accuracy}

    def _metrics(self, path: Float[Tensor, "records n d"], labels: np.ndarray) -> dict[str, float]:
        """The metrics of `kq.transport`, and their baselines.

        `by_lot` is the optimality of a random matching within each class. Most of a distance may be the shift of a
        class as a whole, which all such maps share: `shape` is the optimality of class-centred clouds, with mean 0 at
        the start and at the end, `shape_by_lot` that of their random matching. `published` is the efficiency of the
        released code.
        """
        reading, released = (transport(path, labels, published=own, frames=0) for own in (False, True))
        centred = path[[0, -1]].double()
        for label in np.unique(labels):
            rows = torch.from_numpy(np.flatnonzero(labels == label))
            centred[:, rows] -= centred[:, rows].mean(1, keepdim=True)
        shape = transport(centred, labels, frames=0)
        return {
            **{name: float(getattr(reading, name)) for name in FIGURES},
            "by_lot": reading.wasserstein / reading.random,
            "shape": float(shape.optimality or 0.0),
            "shape_by_lot": shape.wasserstein / shape.random,
            "published": float(released.efficiency or 0.0),
        }


@dataclass(frozen=True, kw_only=True)
class StartTrial:
    """A Transformer whose last maps have learned synthetic points before it learns the data.

    `start` is where those lie: "published", on the circle, not aligned; "toward", on the circle rotated so that every
    class is on the side of its own data; "away", the same with permuted classes.
    """

    start: str
    classes: int
    i: int
    seed: int
    epochs: int = 60

    @property
    def name(self) -> str:
        """The name of its result file."""
        settings = {
            **asdict(self),
            "drawn": DRAWN,
            "first": FIRST,
            "seen": SEEN,
            "enough": [ENOUGH, ROW],
            "length": LENGTH,
        }
        return result_name(("start", self.start, self.classes, self.i, self.seed), settings)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Pre-train, train, and see after how many epochs it is nearly as good as can be."""
        task = Task("published", self.classes, self.i, self.seed, device)
        if self.start != "none":
            self._pretrain(task)
        draw, every = epochs_of(task.samples.take, LEARN[LENGTH], -(-LEARN[LENGTH] // STEPS), self.seed)
        seen: list[float] = []

        def watch(step: int, model: nn.Module) -> None:
            if step % every == 0:
                seen.append(task.accuracy(SEEN))

        recipe = recipe_of("published", every, self.seed, self.epochs, patience=None)
        train(task.model, draw, class_loss, recipe, after=watch)
        goal = ENOUGH * bayes(self.classes, self.i, LENGTH)
        good = [min(seen[epoch : epoch + ROW]) >= goal for epoch in range(len(seen) - ROW + 1)]
        reached = good.index(True) if any(good) else None
        return {
            **asdict(self),
            "dataset": named(self.classes, self.i, LENGTH),
            "reached": self.epochs if reached is None else reached,
            "in_time": reached is not None,
            "accuracy": task.accuracy(),
            "curve": [round(accuracy, 4) for accuracy in seen],
        }

    def _pretrain(self, task: Task) -> None:
        """Teach the head, and nothing else, points of N(μ_c, I)."""
        device = task.samples.x.device
        where = self._centres(task).float()
        y = torch.arange(self.classes).repeat(DRAWN)
        generator = torch.Generator().manual_seed(self.seed)
        x = where[y] + torch.randn(len(y), 2, generator=generator)
        points = Labelled(x.unsqueeze(1).to(device), y.to(device))
        draw, _ = epochs_of(points.take, len(y), len(y) // STEPS, self.seed)
        recipe = Recipe(FIRST, lr=1e-2, schedule="flat", warmup=0, weight_decay=0.0, seed=self.seed, bf16=False)
        head = task.model.head

        def loss(model: nn.Module, batch: Labelled) -> Tensor:
            return class_loss(nn.Sequential(nn.Flatten(), model), batch)

        train(head, draw, loss, recipe)

    def _centres(self, task: Task) -> Float[Tensor, "k 2"]:
        circle = centres("circle", self.classes, 2)
        if self.start == "published":
            return circle
        x, y = task.samples.x.mean(1).cpu(), task.samples.y.cpu()
        means = torch.stack([x[y == place].mean(0) for place in range(self.classes)]).double()
        # The rotation, or reflection, that brings the circle nearest to the means of the data.
        left, _, right = torch.linalg.svd(circle.mT @ (means - means.mean(0)))
        turned = circle @ left @ right
        return turned if self.start == "toward" else turned.roll(1, 0)
