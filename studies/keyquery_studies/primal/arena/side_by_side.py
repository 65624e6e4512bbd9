"""Trainings on Text of the arena, side by side: those of one attention differ in learning rate and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from keyquery.support.checks import check_choice, check_count
from keyquery.training import schedule
from keyquery_studies.common.rates import tuned
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.stacked import Adam, Weights, stacked
from keyquery_studies.common.store import Store, result_name
from keyquery_studies.primal.arena.model import DEPTH, DROPOUT, HEADS, HIDDEN, WIDTH
from keyquery_studies.primal.arena.stacked import STACKED, initial, losses
from keyquery_studies.primal.arena.tasks import SPLITS, TASKS, load_arena

TASK = TASKS["text"]
CHECKS = 12  # evaluations during a training
SEEN = 2500  # training texts on which the last weights are evaluated as well
SIDES = ("general", "primal", "released")  # what is compared
RATES = (1e-4, 3e-4, 1e-3)  # the published rate, and higher ones for fewer steps
Late = Callable[[], bool]
Splits = dict[str, tuple[Tensor, Tensor]]


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


def compared(
    runs: Sequence[TextRun], seeds: Sequence[int], folder: Path, device: str, late: Late = lambda: False
) -> list[dict[str, Any]]:
    """Every arm at all rates with the first seed, then at its best rate with all seeds.

    Rows are kept in `folder`, and those of an earlier call are not computed again; after `late`, none is begun.
    """
    rows: dict[TextRun, dict[str, Any]] = {}

    def run(batch: Sequence[TextRun]) -> list[dict[str, Any]]:
        rows.update(zip(batch, results := trained(batch, folder, device, late), strict=True))
        return results

    best = tuned([replace(run, seed=seeds[0]) for run in runs], RATES, run)
    run([replace(own, seed=seed) for own in best for seed in seeds])
    return [row for row in rows.values() if not row.get("partial")]


def trained(runs: Sequence[TextRun], folder: Path, device: str, late: Late = lambda: False) -> list[dict[str, Any]]:
    """The rows of all runs; those without one are trained side by side, by attention."""
    store = Store(folder / "results")
    splits: Splits = {}
    for attention in dict.fromkeys(run.attention for run in runs):
        todo = [run for run in dict.fromkeys(runs) if run.attention == attention and not store.done(run.name)]
        if todo and not late():
            splits = splits or _load(folder, device, todo[0].length)
            for run, row in zip(todo, _train(todo, splits, device, late), strict=True):
                store.write(run.name, row)
    missing = {"partial": True, "validation": None}
    return [store.read(run.name) if store.done(run.name) else missing for run in runs]


def _load(folder: Path, device: str, length: int) -> Splits:
    arrays = load_arena("text", folder)
    cut = {split: (tokens[:, :length].copy(), labels) for split, (tokens, labels) in arrays.items()}
    return {
        split: (torch.from_numpy(cut[split][0]).to(device), torch.from_numpy(cut[split][1]).to(device))
        for split in SPLITS
    }


def _train(runs: Sequence[TextRun], splits: Splits, device: str, late: Late) -> list[dict[str, Any]]:
    run, count = runs[0], len(splits["train"][1])
    start = [initial(r.attention, r.seed, (TASK.vocabulary, r.length, TASK.classes), r.primal()) for r in runs]
    weights = stacked(start, device)
    rates = torch.tensor([r.lr for r in runs], device=device)
    optimiser = Adam(weights)
    orders = torch.stack([_order(count, run.steps, run.batch, r.seed) for r in runs]).to(device)
    best = {name: weight.detach().clone() for name, weight in weights.items()}
    highest, best_step = torch.zeros(len(runs), device=device), torch.zeros(len(runs), device=device)
    curve: list[list[Any]] = []
    recent: list[Tensor] = []
    began = perf_counter()
    for step in range(run.steps):
        chosen = orders[:, step]
        value = _loss(run, weights, splits["train"][0][chosen], splits["train"][1][chosen])
        value.sum().backward()
        recent.append(value.detach())
        optimiser.step(rates * schedule("linear", step, run.steps, round(TASK.warmup * run.steps / TASK.steps)))
        if (step + 1) % max(run.steps // CHECKS, 1) == 0 or step + 1 == run.steps:
            right = accuracy(run, weights, splits["validation"])
            better = right > highest
            highest, best_step = torch.where(better, right, highest), torch.where(better, step + 1, best_step)
            for name, weight in weights.items():
                best[name][better] = weight.detach()[better]
            curve.append([step + 1, torch.stack(recent).mean(0).tolist(), right.tolist()])
            recent = []
            print(run.attention, step + 1, [round(v, 3) for v in right.tolist()], f"{perf_counter() - began:.0f} s")
        if late():
            return [{"partial": True, "steps_run": step + 1}] * len(runs)
    seconds = perf_counter() - began
    test = accuracy(run, best, splits["test"]).tolist()
    seen = accuracy(run, weights, tuple(part[:SEEN] for part in splits["train"])).tolist()  # type: ignore[arg-type]
    return [
        {
            **asdict(own),
            "primal": own.primal(),
            "accuracy": test[index],
            "validation": 1 - highest[index].item(),  # the error that rates are chosen by
            "best_step": int(best_step[index]),
            "loss": curve[-1][1][index],
            "seen": seen[index],
            "curve": [[step, loss[index], right[index]] for step, loss, right in curve],
            "examples": [len(splits[split][1]) for split in SPLITS],
            "parameters": sum(weight[index].numel() for weight in weights.values()),
            "seconds_together": seconds,
            "device": device_name(device),
        }
        for index, own in enumerate(runs)
    ]


def _loss(run: TextRun, weights: Weights, tokens: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        return losses(weights, run.attention, TASK.settings["primal"][1], tokens, labels)[0]


@torch.no_grad()
def accuracy(run: TextRun, weights: Weights, split: tuple[Tensor, Tensor]) -> Tensor:
    """The share of right answers of every model."""
    tokens, labels = split
    models = len(weights["places"])
    right = torch.zeros(models, device=tokens.device)
    for inputs, truth in zip(tokens.split(2 * run.batch), labels.split(2 * run.batch), strict=True):
        inputs, truth = inputs.expand(models, -1, -1), truth.expand(models, -1)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = losses(weights, run.attention, 0.0, inputs, truth, training=False)[1]
        right += (logits.argmax(-1) == truth).sum(-1)
    return right / len(labels)


def _order(count: int, steps: int, batch: int, seed: int) -> Tensor:
    """The examples of each step: a new permutation of all of them in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(count, generator=generator) for _ in range(-(-steps * batch // count))]
    return torch.cat(epochs)[: steps * batch].view(steps, batch)
