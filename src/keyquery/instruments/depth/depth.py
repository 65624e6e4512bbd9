"""`depth`: how deep is a Transformer to be? The law of depth against width, asked for a budget or about a shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from keyquery.checkpoints import read
from keyquery.instruments.depth.law import FITTED, SIGMAS, Law, count
from keyquery.instruments.depth.separation import log_rank_of_two, separation_bounds
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count, check_number

VERDICTS = ("depth-efficient", "balanced", "depth-inefficient")
WIDEST = 10**7  # beyond any model; ranks are summed over the width
HEADS = ((512, (64, 128, 96, 80)), (128, (32, 16, 24)), (1, (8,)))  # sizes of heads from a width on, the usual first
USUAL = 64
ERRORS = "recalled, not checked against the paper"
ALIKE = 1.25  # parameters of blocks over 12·L·d², and the reverse, up to which a model is as the law counts
CONTRARY = (
    "Kaplan et al. (2020): over a wide range the shape hardly matters",
    "Tay et al. (2021), MobileLLM (2024): deep and thin wins in small models, the law's direction below 1e9 parameters",
)


@dataclass(frozen=True, kw_only=True)
class Depth(Reading, kind="depth"):
    """What the law of depth against width says of a budget, and of a shape if one was given."""

    units: ClassVar[Mapping[str, str]] = {
        "params": "12·layers·width²: embeddings are not among them",
        "interval": "95 %, along the budget, from errors of the fit that are recalled and taken to be independent",
        "saves": "parameters, at most: the shape's less those of the largest shape of the law within it",
        "threshold": "log₃ of the width, layers of a linear-attention network",
        "separation": "log₃ of the separation rank; low and high are recalled bounds",
    }

    params: float
    layers: int
    width: int
    exact: Sequence[float]  # depth and width, unrounded
    interval: Mapping[str, Sequence[float]]  # of layers and width
    usable: Mapping[str, int]  # the shape with a width that whole heads fill
    threshold: float
    separation: Mapping[str, float | None]
    shape: Mapping[str, Any] | None = None  # the one that was asked about
    verdict: str | None = None
    reason: str | None = None
    contained: Sequence[float] | None = None  # the largest shape of the law within it
    saves: int | None = None
    embedding_rank: int | None = None
    notes: Sequence[str] = field(default_factory=list)
    contrary: Sequence[str] = CONTRARY

    def records(self) -> list[dict[str, Any]]:
        """One row: every figure that is one number or one text, the interval's ends among them."""
        ends = {
            f"{name}_{end}": value
            for name, pair in self.interval.items()
            for end, value in zip(("low", "high"), pair, strict=True)
        }
        shape = {f"shape_{name}": value for name, value in (self.shape or {}).items()}
        (row,) = super().records()
        row = {name: value for name, value in row.items() if name not in ("shape", "contained")}
        usable = {f"usable_{name}": value for name, value in self.usable.items()}
        return [{**row, "exact_layers": self.exact[0], "exact_width": self.exact[1], **ends, **usable, **shape}]


def depth(
    params: float | None = None,
    width: int | None = None,
    layers: int | None = None,
    *,
    model: str | Path | nn.Module | None = None,
    vocabulary: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    law: Law | None = None,
) -> Depth:
    """How deep and how wide a Transformer of a budget is to be by ln d = a + b·L, N = 12·L·d², as a Reading.

    Give `params`, a budget without embeddings; or `layers` or `width` alone, for the shape of the law that has them; or
    both, or a `model` (a path, a hub name, a live one), for a verdict. It is "balanced" where the shape's depth lies
    within `.interval`, the 95 % interval of the law at the shape's own budget, in whole layers; "depth-efficient" where
    it is less deep: more depth would pay; "depth-inefficient" where it is deeper: more width would.

    `.saves` is how many parameters a better shape saves at most. If a network that contains another is at least as
    able, and the law's shape is the best of its budget, then the shape of the law that is as able as this one has no
    fewer parameters than the largest one within it (`.contained`), and no more than this one: what it saves lies
    between 0 and the difference.

    A `vocabulary` smaller than the width bounds the rank of the embeddings: the law's width is then min(d, rank), and
    the rest of the budget goes into depth. `heads` are for the bounds of the separation rank, `head_dim` is the size of
    a head in `.usable`; another `law`, such as one of your own fit, may be given.

    >>> reading = kq.depth(params=1.3e9)
    >>> reading.layers, reading.width, reading.usable["width"]
    (42, 1606, 1600)
    >>> reading = kq.depth(width=768, layers=12)
    >>> reading.verdict, reading.layers, reading.width
    ('depth-efficient', 23, 555)
    """
    given = _check(params, width, layers, model, vocabulary, heads, head_dim)
    given, notes = (given, []) if model is None else _shape_of(model)
    ranks = [rank for rank in (vocabulary, given.pop("rank", None)) if rank is not None]
    used = replace(law or Law(), rank=min(ranks, default=None))
    shape = given if "width" in given and "layers" in given else None
    exact, budget = _asked(params, given, used)
    whole = max(round(exact[0]), 1)
    goal = min(_width(budget, whole), used.rank or math.inf)  # fewer layers than the exact number would be wider
    wide = width if shape is None and width else round(goal)
    ends = sorted(used.layers(budget, sigmas) for sigmas in (-SIGMAS, SIGMAS))
    at, law_facts = shape or {"layers": whole, "width": wide}, {"law": asdict(used), "errors": ERRORS, "fitted": FITTED}
    return Depth(
        params=budget,
        layers=whole,
        width=wide,
        exact=exact,
        interval={"layers": ends, "width": [_width(budget, end) for end in reversed(ends)]},
        usable=_usable(goal, whole, head_dim, used.rank),
        threshold=math.log(at["width"], 3),
        separation=_separation(at["layers"], at["width"], heads or at.get("heads")),
        shape=shape,
        **(_judged(shape, ends, used) if shape else {}),
        embedding_rank=used.rank,
        notes=[*_notes(exact, shape, used), *notes],
        provenance=provenance(**law_facts),
    )


def _check(params: Any, width: Any, layers: Any, model: Any, *counts: Any) -> dict[str, Any]:
    """What is given of a shape."""
    given = {name: value for name, value in (("layers", layers), ("width", width)) if value is not None}
    if sum((params is not None, bool(given), model is not None)) != 1:
        raise ValueError("give a budget as params, or layers or width or both, or a model, and only one of these")
    if params is not None:
        check_number("params", params)
        if not 0 < params <= 1e18:
            raise ValueError(f"params must be above 0 and at most 1e18, got {params}")
    for name, value in given.items():
        check_count(name, value, most=WIDEST)
    for name, value in zip(("vocabulary", "heads", "head_dim"), counts, strict=True):
        check_count(name, value, least=2 if name == "vocabulary" else 1, optional=True)
    if "width" in given and counts[1] is not None and given["width"] % counts[1]:
        raise ValueError(f"heads must divide width: {counts[1]} does not divide {given['width']}")
    return given


def _asked(params: float | None, given: Mapping[str, Any], law: Law) -> tuple[tuple[float, float], float]:
    """The shape of the law that is asked for, unrounded, and its parameters."""
    if "width" in given and "layers" in given:
        params = count(given["layers"], given["width"])
    if params is not None:
        if params < (least := count(1, int(law.width(1)))):
            one = f"one layer of the law ({int(law.width(1))} wide)"
            name = "the shape" if given else "the budget"
            raise ValueError(f"{name} must have at least {least:,} parameters, {one}, got {params:,.6g}")
        layers = law.layers(params)
        return (layers, _width(params, layers)), params
    if "layers" in given:
        layers, width = given["layers"], law.width(given["layers"])
        if width > WIDEST:
            raise ValueError(f"layers must be so few that the law's width is at most {WIDEST:,}, got {layers}")
        return (layers, width), count(layers, width)
    width = given["width"]
    if law.rank is not None and width > law.rank:
        raise ValueError(f"width must be at most the rank of the embeddings, {law.rank}, got {width}")
    if (layers := law.depth(width)) < 1:
        raise ValueError(f"width must be at least {math.ceil(law.width(1))}, the law's of one layer, got {width}")
    return (layers, width), count(layers, width)


def _width(params: float, layers: float) -> float:
    """The width that so many layers have within a budget."""
    return math.sqrt(params / count(layers, 1))


def _shape_of(model: str | Path | nn.Module) -> tuple[dict[str, Any], list[str]]:
    """The shape of a model by the names and shapes of its tensors, and what is not as the law counts."""
    found = read(model)
    first, embedding = found[0], found.embedding_shape
    shape = {"layers": found.depth(), "width": first.form.dim, "heads": first.heads, "name": found.model["name"]}
    if embedding is not None:  # as wide as the model they bound nothing but by the number of tokens
        shape["rank"] = embedding[0] if embedding[1] >= shape["width"] else min(embedding)
    within = [size for name, size in found.source.shapes.items() if re.search(r"(^|\.)\d+\.", name)]
    blocks = sum(math.prod(size) for size in within if len(size) in (2, 3))  # masks that old files hold have four
    usual, notes = count(shape["layers"], shape["width"]), []
    if blocks and not 1 / ALIKE < blocks / usual < ALIKE:
        notes = [f"its blocks hold {blocks:,} parameters, where the law counts 12·L·d² = {usual:,}"]
    return shape, notes


def _judged(shape: Mapping[str, Any], ends: Sequence[float], law: Law) -> dict[str, Any]:
    layers, width = shape["layers"], shape["width"]
    low, high = math.floor(ends[0]), math.ceil(ends[1])
    verdict = VERDICTS[(layers >= low) + (layers > high)]
    side = dict(zip(VERDICTS, ("fewer than", "within", "more than"), strict=True))[verdict]
    within = law.contained(layers, width)
    saves = None if within is None else math.floor(count(layers, width) - count(*within))
    return {
        "verdict": verdict,
        "reason": f"{layers} layers are {side} the {low} to {high} that the law gives so many parameters",
        "contained": within,
        "saves": 0 if verdict == "balanced" else saves,
    }


def _usable(goal: float, layers: int, head_dim: int | None, rank: int | None) -> dict[str, int]:
    """Of the widths that whole heads fill, the one nearest to the goal; of equals, that of the most usual size."""
    if head_dim is not None and head_dim > goal:
        raise ValueError(f"head_dim must be at most the width, {goal:,.0f}, got {head_dim:,}")
    sizes = next(sizes for least, sizes in HEADS if goal >= least) if head_dim is None else (head_dim,)
    near = [(size * max(number, 1), size) for size in sizes for number in (int(goal // size), int(goal // size) + 1)]
    near = [pair for pair in near if rank is None or pair[0] <= rank] or [(round(goal), round(goal))]
    width, size = min(near, key=lambda pair: abs(math.log(pair[0] / goal)))
    found = {"layers": layers, "width": width, "heads": width // size, "head_dim": size}
    return {**found, "params": int(count(layers, width))}


def _separation(layers: int, width: int, heads: int | None) -> dict[str, float | None]:
    number = heads or max(round(width / USUAL), 1)
    low, high = separation_bounds(layers, width, number) if number < width else (None, None)
    return {"low": low, "high": high, "two_tokens": log_rank_of_two(layers, width)}


def _notes(exact: Sequence[float], shape: Mapping[str, Any] | None, law: Law) -> list[str]:
    low, high = FITTED
    depths = dict.fromkeys((round(exact[0]), *([shape["layers"]] if shape else [])))
    beyond = " and ".join(str(layers) for layers in depths if not low <= layers <= high)
    notes = [f"the law was fitted on {low} to {high} layers: at {beyond} it is extrapolated"] if beyond else []
    widest = max(exact[1], shape["width"] if shape else 0)
    if law.rank is not None and widest >= law.rank * (1 - 1e-9):
        notes.append(
            f"embeddings of rank {law.rank:,} bound the width that theory counts as used, the rest of the budget is "
            "depth, and no fit covers that"
        )
    return notes
