"""`depth`: the depth-to-width ratio of a Transformer by the published law, for a parameter budget or a shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from keyquery.checkpoints import read
from keyquery.learn.depth.separation import log_rank_of_two
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count, check_number

PER_LAYER = 12  # parameters of a layer over d²: 4 of attention, 8 of an MLP four times as wide
FITTED = (6, 48)  # layers of the decoders that the law was fitted on
SIGMAS = 1.96  # of a 95 % interval
# Verdicts, and how the layers of a shape compare with those of the law.
VERDICTS = (("depth-efficient", "fewer than"), ("balanced", "within"), ("depth-inefficient", "more than"))
WIDEST = 10**7  # beyond any model; ranks are summed over the width
HEADS = ((512, (64, 128, 96, 80)), (128, (32, 16, 24)), (1, (8,)))  # head sizes from a width on, the most common first
TOLERANCE = 0.1  # of the law's depth, within which a shape is balanced if the law has no errors: a convention
ALIKE = 1.25  # factor by which block parameters may differ from 12·L·d²
CONTRARY = (
    "Kaplan et al. (2020): over a wide range the shape hardly matters",
    "Tay et al. (2021), MobileLLM (2024): deep and thin wins in small models, the law's direction below 1e9 parameters",
)


@dataclass(frozen=True)
class Law:
    """ln d = a + b·L between width d and depth L, with N = 12·L·d² non-embedding parameters.

    `a_error` and `b_error` are standard errors, of your own fit: none are checked for the published one. `rank` is that
    of the embeddings: the law's width is then min(d, rank).
    """

    a: float = 5.039
    b: float = 0.0555
    a_error: float | None = None
    b_error: float | None = None
    rank: int | None = None

    @property
    def has_errors(self) -> bool:
        """Whether its standard errors are known."""
        return self.a_error is not None and self.b_error is not None

    def width(self, layers: float, sigmas: float = 0.0) -> float:
        """The width at a depth, plus `sigmas` standard errors."""
        width = math.exp(min(self.a + self.b * layers + sigmas * self._error(layers), 700.0))
        return width if self.rank is None else min(width, self.rank)

    def depth(self, width: float) -> float:
        """The depth at which the law has this width; below 1 if there is no such shape.

        >>> round(Law().depth(768), 1)
        28.9
        """
        return (math.log(width) - self.a) / self.b

    def layers(self, params: float, sigmas: float = 0.0) -> float:
        """The depth for a parameter count: where 12·L·d² = N crosses the law, shifted by `sigmas` standard errors.

        ln L + 2(a + b·L) = ln(N/12) has one solution, since its left side increases with L.
        """
        from scipy.optimize import brentq  # a slow import

        goal = math.log(params / PER_LAYER)
        free = brentq(lambda layers: math.log(layers) + 2 * self._exponent(layers, sigmas) - goal, 1e-99, 1e19)
        if self.rank is None or self._exponent(free, sigmas) <= math.log(self.rank):
            return free
        return params / PER_LAYER / self.rank**2

    def contained(self, layers: float, width: float) -> tuple[float, float] | None:
        """The largest shape on the law that is neither deeper nor wider than this one; None if there is none."""
        if width >= (width_of_law := self.width(layers)):
            return (layers, width_of_law)
        layers_at_width = self.depth(width)
        return (layers_at_width, width) if layers_at_width >= 1 else None

    def _exponent(self, layers: float, sigmas: float) -> float:
        return self.a + self.b * layers + sigmas * self._error(layers)

    def _error(self, layers: float) -> float:
        return math.hypot(self.a_error or 0.0, layers * (self.b_error or 0.0))


@dataclass(frozen=True, kw_only=True)
class Depth(Reading, kind="depth"):
    """The shape that the depth-to-width law gives for a parameter budget, and a verdict on a shape if given."""

    units: ClassVar[Mapping[str, str]] = {
        "params": "12·layers·width²: non-embedding parameters",
        "interval": "95 %, along the budget, from standard errors of the law assumed independent; none without them",
        "saves": "at most: parameters of the shape minus those of the largest shape on the law within it",
        "threshold": "log₃ of the width, layers of a linear-attention network",
        "separation": "log₃ of the separation rank: its bound for two tokens",
    }

    params: float
    layers: int  # recommended depth
    width: int  # recommended width
    exact: Sequence[float]  # depth and width, unrounded
    interval: Mapping[str, Sequence[float]] | None  # of layers and width; None if the law has no errors
    usable: Mapping[str, int]  # the shape with a width divisible by the head size
    threshold: float
    separation: Mapping[str, float | None]
    shape: Mapping[str, Any] | None = None  # the shape passed by the user
    verdict: str | None = None  # on the shape
    reason: str | None = None  # of the verdict
    contained: Sequence[float] | None = None  # the largest shape of the law within it
    saves: int | None = None
    embedding_rank: int | None = None  # bound on the useful width, of the law
    notes: Sequence[str] = field(default_factory=list)  # what a reader should know
    contrary: Sequence[str] = CONTRARY  # published results that disagree

    def records(self) -> list[dict[str, Any]]:
        """One row: every scalar field, with the ends of the intervals."""
        ends = {
            f"{name}_{end}": value
            for name, pair in (self.interval or {}).items()
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
    law: Law | None = None,
) -> Depth:
    """Depth and width of a Transformer for a parameter budget, by the law of Levine et al. (2020).

    ln d = a + b·L and N = 12·L·d², with width d, depth L and N non-embedding parameters. Pass `params`; or `layers` or
    `width` alone, for the shape on the law; or both, or a `model`, for a verdict on that shape.

    Parameters
    ----------
    params
        Non-embedding parameter count. Default: none.
    width, layers
        A width, a depth, or both. Default: none.
    model
        A path, a hub name or a live model, whose shape is used. Default: none.
    vocabulary
        Vocabulary size. If smaller than the width, it bounds the rank of the embeddings: the law's width is then
        min(d, rank), and the rest of the budget goes into depth. Default: no bound, or that of the model.
    law
        Coefficients of the law, for instance of your own fit. Default: `Law()`.

    Returns
    -------
    Depth
        The shape on the law; if the law has standard errors, with its 95 % `.interval`. `.verdict` is "balanced" if
        the depth of the given shape lies within that, or within a tenth of the law's depth, "depth-efficient" if it is
        shallower (more depth would help), "depth-inefficient" if it is deeper (more width would help). `.saves` bounds
        how many parameters a better shape saves: those of the given shape minus those of `.contained`, the largest
        shape on the law within it.

    Examples
    --------
    >>> reading = kq.depth(params=1.3e9)
    >>> reading.layers, reading.width, reading.usable["width"]
    (42, 1606, 1600)
    >>> reading = kq.depth(width=768, layers=12)
    >>> reading.verdict, reading.layers, reading.width
    ('depth-efficient', 23, 555)
    """
    arguments = _check(params, width, layers, model, vocabulary)
    arguments, notes = (arguments, []) if model is None else _shape_of(model)
    ranks = [rank for rank in (vocabulary, arguments.pop("rank", None)) if rank is not None]
    fitted_law = replace(law or Law(), rank=min(ranks, default=None))
    shape = arguments if "width" in arguments and "layers" in arguments else None
    exact, budget = _requested(params, arguments, fitted_law)
    whole = max(round(exact[0]), 1)
    goal = min(width_within(budget, whole), fitted_law.rank or math.inf)  # rounding the depth changes the width
    wide = width if shape is None and width else round(goal)
    ends = _ends(budget, fitted_law)
    interval = {"layers": ends, "width": [width_within(budget, end) for end in reversed(ends)]}
    measured_shape = shape or {"layers": whole, "width": wide}
    return Depth(
        params=budget,
        layers=whole,
        width=wide,
        exact=exact,
        interval=interval if fitted_law.has_errors else None,
        usable=_usable(goal, whole, fitted_law.rank),
        threshold=math.log(measured_shape["width"], 3),
        separation={"two_tokens": log_rank_of_two(measured_shape["layers"], measured_shape["width"])},
        shape=shape,
        **(_judged(shape, ends, fitted_law) if shape else {}),
        embedding_rank=fitted_law.rank,
        notes=[*_notes(exact, shape, fitted_law), *notes],
        provenance=provenance(law=asdict(fitted_law), fitted=FITTED),
    )


def _ends(params: float, law: Law) -> list[float]:
    """The depths between which a shape is balanced: 95 % of the law's, or a tenth around its depth."""
    if law.has_errors:
        return sorted(law.layers(params, sigmas) for sigmas in (-SIGMAS, SIGMAS))
    return [law.layers(params) * (1 - TOLERANCE), law.layers(params) * (1 + TOLERANCE)]


def _check(params: Any, width: Any, layers: Any, model: Any, vocabulary: Any) -> dict[str, Any]:
    """Validate the arguments; returns the shape arguments that are set."""
    shape = {name: value for name, value in (("layers", layers), ("width", width)) if value is not None}
    if sum((params is not None, bool(shape), model is not None)) != 1:
        raise ValueError("pass exactly one of: params, a shape (layers, width or both), or model")
    if params is not None:
        check_number("params", params)
        if not 0 < params <= 1e18:
            raise ValueError(f"params must be above 0 and at most 1e18, got {params}")
    for name, value in shape.items():
        check_count(name, value, most=WIDEST)
    check_count("vocabulary", vocabulary, least=2, optional=True)
    return shape


def _requested(params: float | None, shape: Mapping[str, Any], law: Law) -> tuple[tuple[float, float], float]:
    """The requested shape on the law, unrounded, and its parameter count."""
    if "width" in shape and "layers" in shape:
        params = count(shape["layers"], shape["width"])
    if params is not None:
        if params < (least := count(1, int(law.width(1)))):
            smallest = f"one layer of the law ({int(law.width(1))} wide)"
            name = "the shape" if shape else "the budget"
            raise ValueError(f"{name} must have at least {least:,} parameters, {smallest}, got {params:,.6g}")
        layers = law.layers(params)
        return (layers, width_within(params, layers)), params
    layers = shape["layers"] if "layers" in shape else law.depth(shape["width"])
    width = shape["width"] if "width" in shape else law.width(layers)
    widest = law.rank or WIDEST
    if layers < 1 or width > widest:
        widths = f"its widths are {math.ceil(law.width(1)):,} to {widest:,}"
        raise ValueError(f"the law has no such shape: {widths}, got {width:,.6g} for {layers:.3g} layers")
    return (layers, width), count(layers, width)


def _shape_of(model: str | Path | nn.Module) -> tuple[dict[str, Any], list[str]]:
    """The shape of a model, and notes where its parameter count differs from 12·L·d²."""
    heads = read(model)
    first, embedding = heads[0], heads.embedding_shape
    shape = {"layers": heads.depth(), "width": first.form.dim, "heads": first.heads, "name": heads.model["name"]}
    if embedding is not None:  # full-width embeddings have the rank of the vocabulary
        shape["rank"] = embedding[0] if embedding[1] >= shape["width"] else min(embedding)
    within = [size for name, size in heads.source.shapes.items() if re.search(r"(^|\.)\d+\.", name)]
    blocks = sum(math.prod(size) for size in within if len(size) in (2, 3))  # 4-d buffers are stored causal masks
    usual, notes = count(shape["layers"], shape["width"]), []
    if blocks and not 1 / ALIKE < blocks / usual < ALIKE:
        notes = [f"its blocks have {blocks:,} parameters, the law counts 12·L·d² = {usual:,}"]
    return shape, notes


def _judged(shape: Mapping[str, Any], ends: Sequence[float], law: Law) -> dict[str, Any]:
    layers, width = shape["layers"], shape["width"]
    low, high = math.floor(ends[0]), math.ceil(ends[1])
    verdict, side = VERDICTS[(layers >= low) + (layers > high)]
    within = law.contained(layers, width)
    saves = None if within is None else math.floor(count(layers, width) - count(*within))
    return {
        "verdict": verdict,
        "reason": f"{layers} layers are {side} the {low} to {high} that the law gives for this parameter count",
        "contained": within,
        "saves": 0 if verdict == "balanced" else saves,
    }


def _usable(goal: float, layers: int, rank: int | None) -> dict[str, int]:
    """The width nearest to the goal that is a multiple of a head size; ties go to the most common size."""
    sizes = next(sizes for least, sizes in HEADS if goal >= least)
    near = [(size * max(number, 1), size) for size in sizes for number in (int(goal // size), int(goal // size) + 1)]
    near = [pair for pair in near if rank is None or pair[0] <= rank] or [(round(goal), round(goal))]
    width, size = min(near, key=lambda pair: abs(math.log(pair[0] / goal)))
    shape = {"layers": layers, "width": width, "heads": width // size, "head_dim": size}
    return {**shape, "params": int(count(layers, width))}


def _notes(exact: Sequence[float], shape: Mapping[str, Any] | None, law: Law) -> list[str]:
    low, high = FITTED
    depths = dict.fromkeys((round(exact[0]), *([shape["layers"]] if shape else [])))
    beyond = " and ".join(str(layers) for layers in depths if not low <= layers <= high)
    notes = [f"the law was fitted on {low} to {high} layers: at {beyond} it is extrapolated"] if beyond else []
    widest = max(exact[1], shape["width"] if shape else 0)
    if law.rank is not None and widest >= law.rank * (1 - 1e-9):
        notes.append(
            f"embeddings of rank {law.rank:,} bound the effective width; the rest of the budget goes into depth, "
            "which no fit covers"
        )
    return notes


def count(layers: float, width: float) -> float:
    """N = 12·L·d²."""
    return PER_LAYER * layers * width**2


def width_within(params: float, layers: float) -> float:
    """The width of so many layers within a parameter budget."""
    return math.sqrt(params / count(layers, 1))
