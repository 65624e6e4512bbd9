"""Texts of the Long Range Arena, and trainings on them side by side, which differ in learning rate and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyquery.learn.data import read_column
from keyquery.learn.training.optimisers import schedule
from keyquery.support.checks import check_choice
from keyquery.support.files import write_all
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.stacked import Adam, Replayed, Weights, stacked
from keyquery_studies.common.store import array_file, digest_of, npz_bytes, read_json
from keyquery_studies.common.study import Trial
from keyquery_studies.primal.stacked import STACKED, initial, losses, released, samples_padding

SPLITS = ("train", "validation", "test")
BYTES, CLASSES, LENGTH, WARMUP = 256, 2, 4096, 0.4  # of the task; the share of the steps in which rates rise
PRIMAL: dict[str, Any] = {"rank": 20, "eta": 0.05}  # as published
CHECKS, EVERY = 12, 500  # evaluations during a training, and the most steps between them, as published
PATIENCE = 8  # evaluations without a better validation accuracy of any model, after which a training ends
SEEN = 2500  # training texts on which the last weights are evaluated as well
GROUPS, ALIGNED = 8, 16  # of texts by length, and what the lengths they are cut to are multiples of
Split = tuple[Tensor, Tensor]


def prepare_texts(source: Path | None, folder: Path, checked: int = 2500) -> dict[str, Any]:
    """The facts of the texts in `folder`; they are made of a .tsv file with columns split, label and text if given."""
    facts: dict[str, Any] = read_json(folder / "texts.json", {})
    if source is None:
        if not facts:
            raise ValueError(f"texts need a .tsv file with columns split, label and text: {folder} holds none")
        return facts
    arrays = _texts(source, checked)
    sizes = [len(arrays[f"{split}_labels"]) for split in SPLITS]
    facts = {"digest": digest_of(*arrays.values()), "source": source.name, "examples": sizes}
    folder.mkdir(parents=True, exist_ok=True)
    packed = npz_bytes(arrays, compressed=False)
    write_all({folder / array_file("texts", facts["digest"]): packed, folder / "texts.json": json.dumps(facts) + "\n"})
    return facts


def _texts(path: Path, checked: int) -> dict[str, np.ndarray]:
    """Texts as bytes, padded with 0, which UTF-8 text does not contain."""
    splits, names, texts = (read_column(path, column) for column in ("split", "label", "text"))
    tokens = np.zeros((len(texts), LENGTH), np.uint8)
    for row, text in zip(tokens, texts, strict=True):
        data = np.frombuffer(text.encode()[:LENGTH], np.uint8)
        row[: len(data)] = data
    if not set(names) <= {"0", "1"}:
        raise ValueError(f"{path}: label must be 0 or 1, got {', '.join(sorted(set(names))[:4])}")
    return _split(path, tokens, np.array(names, np.uint8), np.array(splits) == "train", checked)


def _split(
    path: Path, tokens: np.ndarray, labels: np.ndarray, learned: np.ndarray, checked: int
) -> dict[str, np.ndarray]:
    """The given test split; `checked` training examples, drawn once, become the validation split."""
    rest = np.random.default_rng(0).permutation(np.nonzero(learned)[0])  # files are sorted by class
    if not checked < len(rest) < len(labels):
        raise ValueError(f"{path} must hold more than {checked} examples to train on, and some to test on")
    chosen = {"train": rest[checked:], "validation": rest[:checked], "test": np.nonzero(~learned)[0]}
    parts = {split: {split: tokens[rows], f"{split}_labels": labels[rows]} for split, rows in chosen.items()}
    return {name: array for part in parts.values() for name, array in part.items()}


@lru_cache(maxsize=1)
def load_texts(path: Path, length: int, device: str) -> dict[str, Split]:
    """Tokens (count, length) and labels (count,) of each split, on the device."""
    with np.load(path, allow_pickle=False) as file:
        pairs = {split: (file[split][:, :length].copy(), file[f"{split}_labels"]) for split in SPLITS}
    on = {split: [torch.from_numpy(part).to(device) for part in pair] for split, pair in pairs.items()}
    return {split: (tokens, labels) for split, (tokens, labels) in on.items()}


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """One model; `length` cuts the texts, and `steps` rescale the published warm-up and linear decay."""

    attention: str
    seed: int
    data: str  # digest of its sequences
    lr: float = 1e-4
    length: int = 1024
    steps: int = 1200
    batch: int = 32

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, STACKED)

    def primal(self) -> dict[str, Any] | None:
        """Rank and eta, as published."""
        return None if self.attention == "general" else PRIMAL


@dataclass(frozen=True, kw_only=True)
class TextGroup(Trial):
    """Runs of one attention that are trained side by side, by their rates and seeds."""

    run_of: TextRun
    runs: tuple[tuple[float, int], ...]

    @property
    def name(self) -> str:
        """The name of its result file."""
        return f"text-{self.run_of.attention.replace(', ', '-').replace(' ', '-')}-{digest_of(repr(self))}.json"

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """The rows of all runs."""
        splits = load_texts(folder / array_file("texts", self.run_of.data), self.run_of.length, device)
        runs = [replace(self.run_of, lr=rate, seed=seed) for rate, seed in self.runs]
        return {"rows": TextTraining(runs, splits, device).train()}


def grouped_runs(runs: Sequence[TextRun]) -> list[TextGroup]:
    """Runs as jobs: those that differ in rate and seed alone are one."""
    groups: dict[TextRun, list[tuple[float, int]]] = {}
    for run in dict.fromkeys(runs):
        groups.setdefault(replace(run, lr=0.0, seed=0), []).append((run.lr, run.seed))
    return [TextGroup(run_of=run, runs=tuple(members)) for run, members in groups.items()]


class TextTraining:
    """Models of one attention; on a GPU the loss is compiled, and a whole step is one CUDA graph."""

    def __init__(self, runs: Sequence[TextRun], splits: dict[str, Split], device: str) -> None:
        self.runs, self.run, self.splits, self.device = runs, runs[0], splits, device
        sizes = (BYTES, self.run.length, CLASSES)
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

    def train(self) -> list[dict[str, Any]]:
        """The rows of all models, after all steps, or when validation stops improving."""
        run, began, ended, step, since = self.run, perf_counter(), "steps", 0, 0
        every = max(min(run.steps // CHECKS, EVERY), 1)
        for step in range(1, run.steps + 1):
            chosen = self.orders[:, step - 1]
            self.tokens.copy_(self.splits["train"][0][chosen])
            self.labels.copy_(self.splits["train"][1][chosen])
            factor = schedule("linear", step - 1, run.steps, round(WARMUP * run.steps))
            torch.mul(self.base, factor, out=self.rates)
            self.advance()
            if step % every == 0 or step == run.steps:
                self._check(step, step - since, perf_counter() - began)
                since = step
                if step < run.steps and int(self.best_step.max()) <= step - PATIENCE * every:
                    ended = "validation"
                    break
        return self._rows(step, ended, perf_counter() - began)

    def _update(self) -> None:
        eta = PRIMAL["eta"]
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
