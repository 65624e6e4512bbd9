"""One language model of a given number of parameters and layers, for the study `depth`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from time import perf_counter, time
from typing import Any

import torch
from torch import nn

from keyquery.layers import LanguageModel, Shape
from keyquery.learn.depth.law import count
from keyquery.learn.training import Log, Recipe, train
from keyquery.support.checks import check_count
from keyquery_studies.common.language_models import EXAM, tasks
from keyquery_studies.common.objectives import BATCH, SHARES, Task
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import checkpoint_path, result_name

HEAD = 32  # about how wide a head is
USUAL = 128  # the width whose learning rate is the rate itself
CHECKS = 8  # on the way


def width_of(budget: float, layers: int) -> int:
    """The even width at which so many layers come nearest to a budget, 12·L·d²."""
    return max(2 * round(math.sqrt(budget / count(layers, 1)) / 2), 2)


@dataclass(frozen=True, kw_only=True)
class ShapedTraining:
    """A decoder of `layers` layers, as wide as the budget allows; its learning rate is rate·√(128/width)."""

    budget: int
    layers: int
    rate: float
    seed: int
    steps: int
    text: str  # the digest of the corpus
    vocabulary: int
    length: int = 128
    until: float | None = None  # the time at which it is interrupted; not part of the settings, nor is the next
    compiled: bool = False  # each block is compiled, once for all of them

    def __post_init__(self) -> None:
        for name in ("budget", "layers", "steps", "length"):
            check_count(name, getattr(self, name))
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be above 0, got {self.rate}")

    @property
    def name(self) -> str:
        """The name of its result file."""
        fixed = {"batch": BATCH, "exam": EXAM, "head": HEAD, "recipe": asdict(self.recipe()), "shares": SHARES}
        return result_name((self.budget, self.layers, self.rate, self.seed), {**self._settings(), **fixed})

    def _settings(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("until", "compiled")}

    def shape(self) -> Shape:
        """What the model is made of: heads of about 32, of even width."""
        width = width_of(self.budget, self.layers)
        heads = max(round(width / HEAD), 1)
        return Shape(
            vocab_size=self.vocabulary,
            width=width,
            depth=self.layers,
            num_attention_heads=heads,
            length=self.length,
            causal=True,
            head_dim=max(2 * round(width / heads / 2), 2),
        )

    def recipe(self) -> Recipe:
        """AdamW with a rise and a cosine, alike for all but the learning rate, which narrow models take higher."""
        lr = self.rate * math.sqrt(USUAL / width_of(self.budget, self.layers))
        rise, every = min(200, self.steps // 4), max(self.steps // CHECKS, 1)
        return Recipe(self.steps, lr=lr, warmup=rise, seed=self.seed, weight_decay=0.1, check_every=every)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, evaluate on the test split, and analyse the heads."""
        if self._late():
            return {**self._settings(), "partial": True}
        task, exam = tasks(folder, device, "next token", self.length)
        torch.manual_seed(self.seed)
        model = LanguageModel(self.shape()).to(device)
        if self.compiled:
            torch._dynamo.reset()  # what was compiled for other widths would count against its limit
            for block in model.body.blocks:
                block.compile()
        start = perf_counter()
        try:
            log = self._train(model, task, folder)
        except FloatingPointError:  # divergence at a high learning rate is a result, too
            return {**self._settings(), "diverged": True}
        if not log.rows or log.rows[-1]["step"] < self.steps:
            return {**self._settings(), "partial": True}
        if not math.isfinite(log.best):
            return {**self._settings(), "diverged": True}
        return {
            **self._settings(),
            "width": model.config.width,
            "heads": model.config.num_attention_heads,
            "parameters": _count(model.body.blocks),
            "tokens": self.steps * BATCH * self.length,
            "loss": exam.validate(model),
            "validation": log.best,
            "best_step": log.best_step,
            "curve": [[int(row["step"]), row["validation"]] for row in log.rows],
            "mix": _by_layer(task.look(model)),
            "seconds": perf_counter() - start,  # since it was last resumed
            "device": device_name(device),
        }

    def _train(self, model: nn.Module, task: Task, folder: Path) -> Log:
        path = checkpoint_path(folder, self.name)
        options: dict[str, Any] = {"validate": task.validate, "until": lambda step: self._late(), "checkpoint": path}
        return train(model, task.draw, task.loss, self.recipe(), **options)

    def _late(self) -> bool:
        return self.until is not None and time() >= self.until


def _count(module: nn.Module) -> int:
    """Parameters of the blocks, without vectors, which the law does not count."""
    return sum(weight.numel() for weight in module.parameters() if weight.ndim > 1)


def _by_layer(heads: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Means over the heads of each layer."""
    names = ("raw_symmetry", "symmetry", *SHARES)
    layers = sorted({head["layer"] for head in heads})
    return [{name: mean(head[name] for head in heads if head["layer"] == layer) for name in names} for layer in layers]
