"""The trainings of the study: bases side by side, then what is trained from some of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyquery.data import read_corpus
from keyquery_studies.lineage.models import SIZES, Size, Weights, batches, initial, loss, picked, trained

HELD_OUT = 50_000  # bytes at the end of a text
OTHER_TEXT = 4  # one base in so many is trained on the other text


@dataclass(frozen=True)
class Plan:
    """Sizes of the study."""

    bases: int = 96  # of the first config: even ones calibrate, odd ones test
    kin: int = 16  # of the test half: bases from which others are made
    others: int = 16  # bases of each other config
    steps: int = 2000
    tuned: tuple[int, ...] = (50, 200, 500, 1000, 2000)  # steps of further training after which models are kept
    lora: tuple[int, ...] = (100, 400)
    batch: int = 16
    length: int = 64
    rate: float = 3e-3
    tuning_rate: float = 3e-4
    seconds: float = 3600.0  # of all trainings together
    sizes: tuple[Size, ...] = SIZES

    @property
    def parents(self) -> list[int]:
        """Bases from which others are made: the first of the test half."""
        return list(range(1, self.bases, 2))[: self.kin]


class Texts:
    """Two texts in one tensor of bytes, each with a validation split."""

    def __init__(self, paths: Sequence[Path], device: str) -> None:
        parts = [torch.frombuffer(bytearray(read_corpus(path).encode()), dtype=torch.uint8) for path in paths]
        ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
        self.bytes = torch.cat(parts).to(device)
        self.spans = [(low, high - HELD_OUT) for low, high in itertools.pairwise(ends)]
        self.held_out = [(high - HELD_OUT, high) for high in ends[1:]]

    def span(self, base: int, swapped: bool = False) -> tuple[int, int]:
        """The training text of a base, or the other one."""
        return self.spans[(base % OTHER_TEXT == 0) != swapped]

    def losses(self, size: Size, weights: Weights, plan: Plan) -> list[float]:
        """Validation cross-entropy in nats per byte, on the first text."""
        models = len(weights["query"])
        draw = batches(self.bytes, [self.held_out[0]] * models, [0] * models, 4, 64, plan.length)
        with torch.no_grad():
            rows = torch.stack([loss(size, weights, draw(step)) for step in range(4)])
        return [round(float(value), 4) for value in rows.mean(0)]


def bases(plan: Plan, texts: Texts, device: str) -> dict[str, Weights]:
    """Bases of the first config; with them, twins of some: equal data with another seed, equal seed with other data."""
    size, parents = plan.sizes[0], plan.parents
    seeds = [*range(plan.bases), *(1000 + base for base in parents), *parents]
    data = [*range(plan.bases), *parents, *(2000 + base for base in parents)]
    spans = [texts.span(base) for base in (*range(plan.bases), *parents, *parents)]
    draw = batches(texts.bytes, spans, data, plan.steps, plan.batch, plan.length)
    found = trained(size, initial(size, seeds, device), draw, plan.rate, plan.steps, seconds=0.4 * plan.seconds)
    last, n, k = found[max(found)], plan.bases, len(parents)
    return {
        "base": picked(last, range(n)),
        "same data": picked(last, range(n, n + k)),
        "same seed": picked(last, range(n + k, n + 2 * k)),
    }


def other_bases(size: Size, plan: Plan, texts: Texts, device: str) -> Weights:
    """Bases of another config."""
    numbers = range(plan.others)
    spans = [texts.span(base) for base in numbers]
    draw = batches(texts.bytes, spans, list(numbers), plan.steps, plan.batch, plan.length)
    start = initial(size, [5000 + base for base in numbers], device)
    found = trained(size, start, draw, plan.rate, plan.steps, seconds=0.08 * plan.seconds)
    return found[max(found)]


def distilled(plan: Plan, texts: Texts, teachers: Weights, device: str) -> Weights:
    """Students of the same config, from another seed, trained on the predictions of their teachers alone."""
    size, parents = plan.sizes[0], plan.parents
    spans, seeds = [texts.span(base) for base in parents], [3000 + base for base in parents]
    draw = batches(texts.bytes, spans, seeds, plan.steps, plan.batch, plan.length)
    start = initial(size, seeds, device)
    found = trained(size, start, draw, plan.rate, plan.steps, teacher=teachers, seconds=0.1 * plan.seconds)
    return found[max(found)]


def fine_tunes(plan: Plan, texts: Texts, start: Weights) -> dict[str, Weights]:
    """Further training of the parents, by kind and steps.

    "tuned": on the other text; "continued": on the same text, in another order; "retrained": that at the rate of
    pre-training; "LoRA": low-rank updates of the attention, on the other text.
    """
    size, parents, last = plan.sizes[0], plan.parents, max(plan.tuned)
    swapped, same = ([texts.span(base, swap) for base in parents] for swap in (True, False))
    seeds = [4000 + base for base in parents]
    arms: Mapping[str, tuple[list[tuple[int, int]], float, tuple[int, ...]]] = {
        "tuned": (swapped, plan.tuning_rate, plan.tuned),
        "continued": (same, plan.tuning_rate, plan.tuned),
        "retrained": (same, plan.rate, (*plan.tuned, 2 * last)),
        "LoRA": (swapped, 3 * plan.tuning_rate, plan.lora),
    }
    found: dict[str, Weights] = {}
    for kind, (spans, rate, kept) in arms.items():
        draw = batches(texts.bytes, spans, seeds, max(kept), plan.batch, plan.length)
        limits: dict[str, Any] = {"kept": kept, "lora": kind == "LoRA", "seconds": 0.15 * plan.seconds}
        for step, weights in trained(size, start, draw, rate, max(kept), **limits).items():
            found[f"{kind} {step}"] = weights
    return found


def single(weights: Weights, index: int) -> dict[str, Tensor]:
    """One model on the CPU, without the leading dimension."""
    return {name: value[index].detach().cpu() for name, value in weights.items()}
