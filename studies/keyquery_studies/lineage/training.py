"""The trainings of the study: bases side by side, then what is trained from some of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keyquery.learn.data import read_corpus
from keyquery_studies.lineage.kin import DISGUISES, disguises
from keyquery_studies.lineage.models import (
    SIZES,
    Draw,
    Size,
    Weights,
    batches,
    initial,
    joined,
    loss,
    picked,
    together,
    trained,
)

HELD_OUT = 50_000  # bytes at the end of a text
SEEDS = 100_000  # random seeds of a run of the study
RETRAINED = DISGUISES[:2]
OTHER_TEXT = 4  # one base in so many is trained on the other text


@dataclass(frozen=True)
class Plan:
    """Sizes of the study."""

    bases: int = 48  # of the first config
    kin: int = 16  # of them: bases from which others are made
    others: int = 16  # bases of each other config
    steps: int = 2000
    tuned: tuple[int, ...] = (50, 200, 500, 1000, 2000)  # steps of further training after which models are kept
    retrained: tuple[int, ...] = (50, 100, 200, 500, 1000, 2000, 3000)  # the same, at the rate of pre-training
    lora: tuple[int, ...] = (100, 400)
    batch: int = 16
    length: int = 64
    rate: float = 3e-3
    tuning_rate: float = 3e-4
    seed: int = 1  # runs of different seeds share no model
    seconds: float = 3600.0  # of all trainings together
    sizes: tuple[Size, ...] = SIZES

    @property
    def parents(self) -> list[int]:
        """Bases from which others are made."""
        return list(range(self.bases))[: self.kin]


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


def bases(plan: Plan, texts: Texts, device: str, end: float) -> tuple[dict[str, Weights], dict[str, int]]:
    """Bases of all configs by name, of the first also twins of some; and the steps that each config was trained for.

    "same data": equal data with another seed; "same seed": equal initialisation with other data. When the clock is past
    `end`, trainings are stopped.
    """
    first, parents = plan.sizes[0], plan.parents
    drawn = [*range(plan.bases), *(1000 + base for base in parents), *parents]
    data = [*range(plan.bases), *parents, *(2000 + base for base in parents)]
    runs = {first.name: (first, drawn, data, [*range(plan.bases), *parents, *parents])}
    for size in plan.sizes[1:]:
        numbers = [*range(plan.others)]
        runs[size.name] = (size, [5000 + base for base in numbers], numbers, numbers)
    trainings = {
        name: trained(
            size,
            initial(size, [plan.seed * SEEDS + seed for seed in seeds], device),
            _draw(plan, texts, [texts.span(base) for base in of_base], order, plan.steps),
            plan.rate,
            plan.steps,
            end=end,
        )
        for name, (size, seeds, order, of_base) in runs.items()
    }
    kept = together(trainings)
    steps = {name: max(models) for name, models in kept.items()}
    found = {name: models[steps[name]] for name, models in kept.items()}
    last, n, k = found.pop(first.name), plan.bases, len(parents)
    parts = {"base": range(n), "same data": range(n, n + k), "same seed": range(n + k, n + 2 * k)}
    return {**{name: picked(last, part) for name, part in parts.items()}, **found}, steps


def _draw(plan: Plan, texts: Texts, spans: Sequence[tuple[int, int]], seeds: Sequence[int], steps: int) -> Draw:
    own = [plan.seed * SEEDS + seed for seed in seeds]
    return batches(texts.bytes, spans, own, steps, plan.batch, plan.length)


@dataclass(frozen=True)
class Arm:
    """One way in which all parents are trained further."""

    start: Weights
    spans: Sequence[tuple[int, int]]  # of text
    rate: float
    kept: tuple[int, ...]


def arms(plan: Plan, texts: Texts, start: Weights, device: str) -> dict[str, Arm]:
    """What is trained from the parents, by name.

    "tuned": on the other text; "continued": on the same text, in another order; "retrained": that at the rate of
    pre-training; also from disguised parents.
    """
    swapped, same = ([texts.span(base, swap) for base in plan.parents] for swap in (True, False))
    disguised = [disguises(plan.sizes[0], single(start, i), base) for i, base in enumerate(plan.parents)]
    starts = {
        kind: {name: torch.stack([own[kind][name] for own in disguised]).to(device) for name in start}
        for kind in DISGUISES
    }
    slow, fast = (plan.tuning_rate, plan.tuned), (plan.rate, plan.retrained)
    return {
        "tuned": Arm(start, swapped, *slow),
        "continued": Arm(start, same, *slow),
        "all disguises, tuned": Arm(starts["all disguises"], swapped, *slow),
        "retrained": Arm(start, same, *fast),
        **{f"{kind}, retrained": Arm(starts[kind], same, *fast) for kind in RETRAINED},
    }


def offspring(plan: Plan, texts: Texts, start: Weights, device: str, end: float) -> dict[str, Weights]:
    """What is trained from the parents, by kind and steps: all `arms`, and two more.

    "LoRA": low-rank updates of the attention, on the other text; "distilled": students from another seed that learn the
    predictions of their teachers alone. Arms of equal rate are trained side by side.
    """
    size, parents = plan.sizes[0], plan.parents
    ways = arms(plan, texts, start, device)
    seeds, students = ([number + base for base in parents] for number in (4000, 3000))
    sides = {rate: [name for name, arm in ways.items() if arm.rate == rate] for rate in (plan.tuning_rate, plan.rate)}
    trainings = {}
    for rate, names in sides.items():
        kept, spans = ways[names[0]].kept, [span for name in names for span in ways[name].spans]
        draw = _draw(plan, texts, spans, seeds * len(names), max(kept))
        weights = joined([ways[name].start for name in names])
        trainings[f"{rate}"] = trained(size, weights, draw, rate, max(kept), kept=kept, end=end)
    draw = _draw(plan, texts, ways["tuned"].spans, seeds, max(plan.lora))
    rate, kept = 3 * plan.tuning_rate, plan.lora
    trainings["LoRA"] = trained(size, start, draw, rate, max(kept), kept=kept, lora=True, end=end)
    pupils = initial(size, [plan.seed * SEEDS + seed for seed in students], device)
    draw = _draw(plan, texts, ways["continued"].spans, students, plan.steps)
    trainings["distilled"] = trained(size, pupils, draw, plan.rate, plan.steps, teacher=start, end=end)
    found = together(trainings)
    taught = found.pop("distilled")
    kinds = {f"LoRA {step}": weights for step, weights in found["LoRA"].items()}
    for rate, names in sides.items():
        for number, name in enumerate(names):
            part = range(number * len(parents), (number + 1) * len(parents))
            kinds |= {f"{name} {step}": picked(weights, part) for step, weights in found[f"{rate}"].items()}
    return {**kinds, "distilled": taught[max(taught)]}


def single(weights: Weights, index: int) -> dict[str, Tensor]:
    """One model on the CPU, without the leading dimension."""
    return {name: value[index].detach().cpu() for name, value in weights.items()}
