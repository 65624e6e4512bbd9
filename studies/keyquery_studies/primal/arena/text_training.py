"""Trainings on Text of the arena side by side, which differ in learning rate and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from keyquery.learn.training.optimisers import schedule
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.stacked import Adam, Replayed, Weights, stacked
from keyquery_studies.common.store import result_name
from keyquery_studies.primal.arena.model import DEPTH, DROPOUT, HEADS, HIDDEN, WIDTH
from keyquery_studies.primal.arena.stacked import STACKED, initial, losses, released, samples_padding
from keyquery_studies.primal.arena.tasks import SPLITS, TASKS

TASK = TASKS["text"]
CHECKS, EVERY = 12, 500  # evaluations during a training, and the most steps between them, as published
PATIENCE = 8  # evaluations without a better validation accuracy of any model, after which a training ends
SEEN = 2500  # training texts on which the last weights are evaluated as well
GROUPS, ALIGNED = 8, 16  # of texts by length, and what the lengths they are cut to are multiples of
Late = Callable[[], bool]
Split = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """One model; `length` cuts the texts, and `steps` rescale the published warm-up and linear decay."""

    attention: str
    seed: int
    data: str  # digest of its sequences
    lr: float = 1e-4
    length: int = 2048
    steps: int = 4000
    batch: int = 32

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, STACKED)
        for name in ("length", "steps", "batch"):
            check_count(name, getattr(self, name))

    @property
    def name(self) -> str:
        """The name of its result file."""
        words = ("text", self.attention.replace(",", ""), self.lr, self.seed)
        return result_name(words, {**asdict(self), "design": [WIDTH, DEPTH, HEADS, HIDDEN, DROPOUT]})

    def primal(self) -> dict[str, Any] | None:
        """Rank and eta, as published."""
        rank, eta = TASK.settings["primal"]
        return None if self.attention == "general" else {"rank": rank, "eta": eta}


class TextTraining:
    """Models of one attention; on a GPU the loss is compiled, and a whole step is one CUDA graph."""

    def __init__(self, runs: Sequence[TextRun], splits: dict[str, Split], device: str) -> None:
        self.runs, self.run, self.splits, self.device = runs, runs[0], splits, device
        sizes = (TASK.vocabulary, self.run.length, TASK.classes)
        self.weights = stacked([initial(run.attention, run.seed, sizes, run.primal()) for run in runs], device)
        self.best = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.highest, self.best_step = (torch.zeros(len(runs), device=device) for _ in range(2))
        self.base = torch.tensor([run.lr for run in runs], device=device)
        self.rates, self.total = torch.zeros_like(self.base), torch.zeros_like(self.base)
        self.optimiser = Adam(self.weights)
        tokens, labels = splits["train"]
        orders = [example_order(len(labels), self.run.steps, self.run.batch, run.seed) for run in runs]
        self.orders = torch.stack(orders).to(device)
        self.tokens, self.labels = tokens[self.orders[:, 0]], labels[self.orders[:, 0]]
        self.cuts = (
            longest((tokens > 0).sum(1)[self.orders], self.run.length) if self.run.attention == "general" else []
        )
        self.curve: list[list[Any]] = []
        self.losses = torch.compile(losses) if device.startswith("cuda") else losses
        self.advance = Replayed(self._update, device)

    def train(self, late: Late) -> list[dict[str, Any]]:
        """The rows of all models, after all steps, or when validation stops improving, or when it is late."""
        run, began, ended, step, since = self.run, perf_counter(), "steps", 0, 0
        every = max(min(run.steps // CHECKS, EVERY), 1)
        for step in range(1, run.steps + 1):
            chosen = self.orders[:, step - 1]
            self.tokens.copy_(self.splits["train"][0][chosen])
            self.labels.copy_(self.splits["train"][1][chosen])
            factor = schedule("linear", step - 1, run.steps, round(TASK.warmup * run.steps / TASK.steps))
            torch.mul(self.base, factor, out=self.rates)
            self.advance()
            if step % every == 0 or step == run.steps:
                self._check(step, step - since, perf_counter() - began)
                since = step
                if step < run.steps and int(self.best_step.max()) <= step - PATIENCE * every:
                    ended = "validation"
                    break
                if step < run.steps and late():
                    ended = "time"
                    break
        return self._rows(step, ended, perf_counter() - began)

    def _update(self) -> None:
        eta = TASK.settings["primal"][1]
        with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=self.tokens.is_cuda, cache_enabled=False):
            value = self.losses(
                self.weights, self.run.attention, eta, self.tokens, self.labels, training=True, cuts=self.cuts
            )[0]
        value.sum().backward()
        self.total.add_(value.detach())
        self.optimiser.step(self.rates)

    def _check(self, step: int, steps: int, seconds: float) -> None:
        right = accuracy(self.run, self.weights, self.splits["validation"])
        better = right > self.highest
        self.highest = torch.where(better, right, self.highest)
        self.best_step = torch.where(better, step, self.best_step)
        for name, weight in self.weights.items():
            self.best[name][better] = weight.detach()[better]
        self.curve.append([step, (self.total / steps).tolist(), right.tolist()])
        self.total.zero_()
        print(self.run.attention, step, [round(v, 3) for v in right.tolist()], f"{seconds:.0f} s", flush=True)

    def _rows(self, step: int, ended: str, seconds: float) -> list[dict[str, Any]]:
        test = accuracy(self.run, self.best, self.splits["test"]).tolist()
        tokens, labels = self.splits["train"]
        seen = accuracy(self.run, self.weights, (tokens[:SEEN], labels[:SEEN])).tolist()
        return [
            {
                **asdict(own),
                "primal": own.primal(),
                "accuracy": test[index],
                "validation": 1 - self.highest[index].item(),  # the error that rates are chosen by
                "best_step": int(self.best_step[index]),
                "steps_run": step,
                "ended": ended,
                "loss": self.curve[-1][1][index],
                "seen": seen[index],
                "curve": [[step, loss[index], right[index]] for step, loss, right in self.curve],
                "examples": [len(self.splits[split][1]) for split in SPLITS],
                "parameters": sum(weight[index].numel() for weight in self.weights.values()),
                "seconds_together": seconds,
                "device": device_name(self.device),
            }
            for index, own in enumerate(self.runs)
        ]


@torch.no_grad()
def accuracy(run: TextRun, weights: Weights, split: Split) -> Tensor:
    """The share of right answers of every model; texts are sorted by length and cut, unless padding has an effect."""
    tokens, labels = split
    models = len(weights["places"])
    right = torch.zeros(models, device=tokens.device)
    lengths = (tokens > 0).sum(1)
    order = lengths.argsort()
    whole = released(run.attention) or samples_padding(run.attention)
    for rows in order.split(2 * run.batch):
        cut = tokens.shape[1] if whole else max(int(lengths[rows[-1]]), 1)
        inputs, truth = tokens[rows, :cut].expand(models, -1, -1), labels[rows].expand(models, -1)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = losses(weights, run.attention, 0.0, inputs, truth, training=False)[1]
        right += (logits.argmax(-1) == truth).sum(-1)
    return right / len(labels)


def example_order(count: int, steps: int, batch: int, seed: int) -> Tensor:
    """The examples of each step: a new permutation of all of them in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(count, generator=generator) for _ in range(-(-steps * batch // count))]
    return torch.cat(epochs)[: steps * batch].view(steps, batch)


def longest(lengths: Tensor, most: int, groups: int = GROUPS) -> list[int]:
    """The longest text of each group over all steps, for (models, steps, batch) lengths, rounded up to at most
    `most`.
    """
    ordered = lengths.transpose(0, 1).flatten(1).sort(1).values
    ends = [int(group.max()) for group in ordered.tensor_split(groups, 1) if group.numel()]
    return [min(-(-end // ALIGNED) * ALIGNED, most) for end in ends]
