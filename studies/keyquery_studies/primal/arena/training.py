"""One training run on a task of the Long Range Arena; resumable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.learn.training import Recipe, train
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import checkpoint_path, result_name
from keyquery_studies.primal.arena.model import ATTENTIONS, DEPTH, DROPOUT, HEADS, HIDDEN, WIDTH, Classifier
from keyquery_studies.primal.arena.tasks import SPLITS, TASKS, load_arena
from keyquery_studies.primal.released_code import published_regularizer, start_as_published

SCHEDULES = ("published", "shortened")
STARTS = ("published", "default")  # of primal layers
DESIGN = (WIDTH, DEPTH, HEADS, HIDDEN, DROPOUT)
Split = tuple[UInt8[Tensor, "count n"], UInt8[Tensor, " count"]]


@lru_cache(maxsize=1)
def _load(task: str, folder: Path, device: str) -> dict[str, Split]:
    """All sequences, on the device, so that no batch has to be copied."""
    arrays = load_arena(task, folder)
    return {split: tuple(torch.from_numpy(array).to(device) for array in arrays[split]) for split in SPLITS}  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class ArenaTraining:
    """A model with one kind of attention, trained on one task for a share of the published steps.

    With `schedule="published"`, a share below 1 is a run stopped early: its learning rate has not decayed yet, and it
    can be resumed to a larger share. With "shortened", warm-up and decay are rescaled to the share, so that it ends
    like a full run, and it cannot be extended.
    """

    task: str
    attention: str
    seed: int
    data: str  # digest of its sequences
    share: float = 1.0
    schedule: str = "published"
    start: str = "published"
    steps: int | None = None  # of a full run; None: as published
    batch: int | None = None  # None: as published
    minutes: float | None = None  # time limit; not part of the settings

    def __post_init__(self) -> None:
        check_choice("task", self.task, tuple(TASKS))
        check_choice("attention", self.attention, ATTENTIONS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("start", self.start, STARTS)
        check_count("steps", self.steps, optional=True)
        check_count("batch", self.batch, optional=True)
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if self.minutes is not None and not self.minutes >= 0:
            raise ValueError(f"minutes must be at least 0, got {self.minutes}")

    @property
    def name(self) -> str:
        """The name of its result file."""
        return result_name((self.task, self.attention, self.share, self.seed), self._settings())

    def _settings(self) -> dict[str, Any]:
        settings = {key: value for key, value in asdict(self).items() if key != "minutes"}
        return {**settings, "recipe": asdict(self.recipe()), "design": list(DESIGN), "primal": self.primal()}

    def _checkpoint(self, folder: Path) -> Path:
        """A run stopped early resumes from the checkpoint of any shorter one."""
        settings = self._settings()
        del settings["share"]
        return checkpoint_path(folder, result_name((self.task, self.attention, self.seed), settings))

    def primal(self) -> dict[str, Any] | None:
        """Rank and eta, as published."""
        if self.attention == "general":
            return None
        rank, eta = TASKS[self.task].settings[self.attention]
        return {"rank": rank, "eta": eta}

    def recipe(self) -> Recipe:
        """AdamW at 1e-4, without weight decay; linear warm-up and linear decay.

        The published warm-up starts at lr/25, and its AdamW has other betas (.9, .999) and eps (1e-6).
        """
        task = TASKS[self.task]
        steps = self.steps or task.steps
        if self.schedule == "shortened":
            steps = max(round(self.share * steps), 1)
        return Recipe(
            steps,
            lr=1e-4,
            schedule="linear",
            warmup=round(task.warmup * steps / task.steps),
            weight_decay=0.0,
            clip=None,
            seed=self.seed,
            check_every=max(steps // task.checks, 1),
        )

    def end(self) -> int:
        """The last step: that of the share, rounded up to the next evaluation."""
        recipe = self.recipe()
        if self.schedule == "shortened":
            return recipe.steps
        checks = -(-round(self.share * recipe.steps) // recipe.check_every)
        return min(checks * recipe.check_every, recipe.steps)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, and test the weights with the best validation accuracy."""
        task = TASKS[self.task]
        recipe = self.recipe()
        end = self.end()
        splits = _load(self.task, folder, device)
        tokens, labels = splits["train"]
        batch = self.batch or task.batch
        order = _order(len(labels), recipe.steps, batch, self.seed).to(device)
        torch.manual_seed(self.seed)
        model = Classifier(self.attention, task.vocabulary, tokens.shape[1], task.classes, self.primal())
        if self.start == "published":
            start_as_published(model)
        model = model.to(device)
        clock = _Clock(self.minutes, end)

        def draw(step: int, generator: torch.Generator) -> Split:
            chosen = order[step]
            return tokens[chosen], labels[chosen]

        def loss(model: nn.Module, batch: Split) -> Tensor:
            tokens, labels = batch
            mask = tokens > 0 if task.padded else None
            return cross_entropy(model(tokens, mask).float(), labels.long()) + published_regularizer(model)

        def validate(model: nn.Module) -> float:
            with clock.paused():
                return 1 - accuracy(model, splits["validation"], task.padded, batch)

        path = self._checkpoint(folder)
        log = train(model, draw, loss, recipe, validate=validate, until=clock.over, checkpoint=path)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        clock.stop()
        return {**self._settings(), **self._row(log, clock, model, splits["test"], device)}

    def _row(self, log: Any, clock: _Clock, model: nn.Module, test: Split, device: str) -> dict[str, Any]:
        task = TASKS[self.task]
        done, steps_here = clock.step, clock.steps
        return {
            "accuracy": accuracy(model, test, task.padded, self.batch or task.batch) if log.rows else None,
            "validation": 1 - log.best if log.rows else None,
            "best_step": log.best_step,
            "steps_run": done,
            "share_run": done / task.steps,  # of the published steps
            "schedule_run": done / self.recipe().steps,  # of its own steps: below 1, the learning rate has not decayed
            "partial": done < self.end(),
            "published": task.accuracy[self.attention] / 100,
            "curve": [[int(row["step"]), 1 - row["validation"]] for row in log.rows],
            "loss": log.rows[-1]["loss"] if log.rows else None,
            "seconds": clock.trained,  # in this process, without evaluations
            "ms_a_step": 1e3 * clock.trained / steps_here if steps_here else None,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "device": device_name(device),
        }


class _Clock:
    """Training time in this process, without evaluations, and whether the run should stop."""

    def __init__(self, minutes: float | None, end: int) -> None:
        self.began = perf_counter()
        self.limit = math.inf if minutes is None else self.began + 60 * minutes
        self.end, self.step, self.trained = end, 0, 0.0
        self.first: int | None = None
        self.since = self.began

    def over(self, step: int) -> bool:
        """Called before the first step and after each."""
        now = perf_counter()
        if self.first is None:
            self.first, self.since = step, now
        self.step = step
        return step >= self.end or now >= self.limit

    @property
    def steps(self) -> int:
        """Steps taken in this process."""
        return self.step - (self.first or 0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock; the caller has synchronised the device."""
        self.stop()
        yield
        self.since = perf_counter()

    def stop(self) -> None:
        """Add the elapsed time."""
        self.trained += perf_counter() - self.since


def accuracy(model: nn.Module, split: Split, padded: bool, batch: int) -> float:
    """Accuracy, in the precision of training."""
    tokens, labels = split
    model.eval()
    right = torch.zeros((), dtype=torch.long, device=tokens.device)
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        for inputs, truth in zip(tokens.split(2 * batch), labels.split(2 * batch), strict=True):
            right += (model(inputs, inputs > 0 if padded else None).argmax(-1) == truth).sum()
    return float(right) / len(labels)


def _order(count: int, steps: int, batch: int, seed: int) -> Tensor:
    """The examples of each step (steps, batch): a new permutation of all of them in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(count, generator=generator).int() for _ in range(-(-steps * batch // count))]
    return torch.cat(epochs)[: steps * batch].view(steps, batch)
