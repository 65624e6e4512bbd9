"""Metrics of heads on data: shares of the variance of their scores, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float64
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.forms.parts import PARTS
from keyquery.forms.shares import Visible, part_ranks, shares
from keyquery.instruments.look.sample import Sample
from keyquery.listening import Batch, Moments, joint_moments, typical_length
from keyquery.listening.parts.on_data import SEQUENCES, rows_of, score_variances
from keyquery.listening.parts.shares import Estimate, score_shares
from keyquery.listening.parts.variance import ScoreVariance
from keyquery.support.progress import Progress
from keyquery.support.statistics import student

PAIRS = ("visible", "independent")
SHARES = (*PARTS, "interaction", "symmetry")
CROSS = ("pairwise", "popularity", "query_only", "position", "interaction", "sink")  # of cross-attention
SQUARES = (*PARTS, "pairwise", "sink")


@dataclass(frozen=True)
class OnData:
    """Statistics from running the model on data; empty without data."""

    sums: Mapping[int, ScoreVariance] = field(default_factory=dict)  # pairs="visible"
    moments: Mapping[int, Moments] = field(default_factory=dict)  # pairs="independent"
    facts: Mapping[str, Any] | None = None
    sample: Sample | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batches: list[Batch],
        heads: Heads,
        facts: Mapping[str, Any],
        sample: Sample | None,
        watching: Progress,
    ) -> OnData:
        """Run the model; `facts` hold the longest window, the origin of the data, and which pairs count."""
        if not any(layer.kind == "self" for layer in heads):
            raise ValueError("only self-attention is analysed on data, and this model has none: omit text and inputs")
        # Sequences are often much shorter than the longest window; inputs are not cut, and may be longer.
        typical = typical_length(batches)
        longest = max(facts["longest"], typical or 0)
        described = {"sequences": sum(map(rows_of, batches)), "length": typical or longest, **facts, "longest": longest}
        if facts["pairs"] == "independent":
            moments = joint_moments(model, watching(batches, "running the model", len(batches)), heads)
            count = next(iter(moments.values())).count
            return cls(moments=moments, facts={"tokens": count, **described}, sample=sample)
        sums = score_variances(model, batches, heads, lambda some: watching(some, "running the model", len(some)))
        if typical is None:  # images, sounds and inputs of other names
            described["length"] = described["longest"] = max(each.longest for each in sums.values())
        return cls(sums=sums, facts=_described(sums, described), sample=sample)

    def of_layer(self, layer: Layer, heads: Heads) -> list[dict[str, Any] | None]:
        """Metrics of each head of a layer; None without data, and for cross-attention in closed form."""
        if layer.index in self.sums:
            sums = self.sums[layer.index]
            return _crossed(sums) if sums.is_cross else _measured(sums)
        if layer.index in self.moments:
            return _closed_form(layer, heads, self.moments[layer.index], (self.facts or {})["length"])
        return [None] * layer.heads

    def scores(self, layer: Layer, heads: Heads) -> list[dict[str, Any]] | None:
        """Scores of every head on the sample's tokens, by part; None without a sample."""
        if self.sample is None or layer.index not in self.sample.projected or layer.index not in self.sums:
            return None
        return self.sample.scores(layer, heads, self.sums[layer.index].means, self.sums[layer.index].by_position)


def _described(sums: Mapping[int, ScoreVariance], facts: dict[str, Any]) -> dict[str, Any]:
    """The data that shares are measured on, with notes on their limits."""
    first = next(iter(sums.values()))
    notes = []
    if not first.by_position:
        notes.append(
            f"{facts['sequences']} sequences are too few for means by position, which need {SEQUENCES}: means are "
            "over all positions, and learned positions count as popularity"
        )
    if first.left_out:
        share = first.left_out / (first.left_out + first.pairs)
        notes.append(f"{share:.0%} of the visible pairs are excluded: too few sequences reach their positions")
    tokens = int(first.tokens.sum())
    kind = "by position" if first.by_position else "over all positions"
    return {"tokens": tokens, **facts, "means": kind, **({"note": "; ".join(notes)} if notes else {})}


def _measured(sums: ScoreVariance) -> list[dict[str, Any] | None]:
    shares = score_shares(sums)
    heads = len(shares.estimates["skew"].value)
    rows: list[dict[str, Any] | None] = []
    for head in range(heads):
        own = {name: float(estimate.value[head]) for name, estimate in shares.estimates.items() if name != "pairwise"}
        half = {name: float(shares.half[name].value[head]) for name in SHARES}
        intervals = {
            name: interval(estimate, head, square=name in SQUARES) for name, estimate in shares.estimates.items()
        }
        unstable = [name for name in ("symmetry",) if own[name] * half[name] < 0]
        pairs = {name: float(value[head]) for name, value in shares.interactions.items()}
        rows.append(
            {**own, "intervals": intervals, "half_window": half, "sign_changes": unstable, "interactions": pairs}
        )
    return rows


def _crossed(sums: ScoreVariance) -> list[dict[str, Any] | None]:
    """As `_measured`, with pairwise in place of symmetric and skew, which two sequences do not have."""
    shares = score_shares(sums)
    names = {"pairwise": "symmetric", **{name: name for name in CROSS if name != "pairwise"}}
    own = {"symmetric": "pairwise"}
    return [
        {
            **{name: float(shares.estimates[kept].value[head]) for name, kept in names.items()},
            "intervals": {
                name: interval(shares.estimates[kept], head, square=name in SQUARES) for name, kept in names.items()
            },
            "interactions": {
                " × ".join(own.get(part, part) for part in pair.split(" × ")): float(value[head])
                for pair, value in shares.interactions.items()
                if "skew" not in pair
            },
        }
        for head in range(len(shares.estimates["skew"].value))
    ]


def interval(estimate: Estimate, head: int, square: bool = False) -> list[float] | None:
    """The 95 % interval of one head's estimate; None with too few sequences.

    `square`: the value is a sum of squares, whose error grows with it; its interval is computed for the logarithm,
    unless the value is too close to 0.
    """
    value, error, freedom = (float(number[head]) for number in estimate)
    if not math.isfinite(error) or freedom < 1:
        return None
    half = student(int(freedom + 1e-6)) * error  # n − 1 may be rounded down to less
    if square and half < value / 2:
        return [value * math.exp(-half / value), value * math.exp(half / value)]
    return [value - half, value + half]


def _closed_form(layer: Layer, heads: Heads, moments: Moments, length: int) -> list[dict[str, Any] | None]:
    """Shares for independent tokens, from the covariance of queries and keys alone."""
    visible = Visible(length, layer.causal, layer.window)
    bias = heads.position_bias(layer, visible.offsets())
    mean, covariance = moments.mean.cpu(), moments.covariance.cpu()  # small
    numbers = shares(mean, covariance, layer.scale, visible, layer.rope, None if bias is None else bias.cpu())
    symmetric, skew = part_ranks(covariance)
    numbers |= {"effective_rank_symmetric": symmetric, "effective_rank_skew": skew}
    return list(by_head(numbers, 1))


def by_head(values: Mapping[str, Float64[Tensor, "*batch"] | Tensor], batch: int) -> list[dict[str, Any]]:
    """Values with one or two batch dimensions, as one row per head."""
    flat = {name: value.flatten(0, batch - 1).tolist() for name, value in values.items()}
    count = len(next(iter(flat.values())))
    return [{name: per_head[head] for name, per_head in flat.items()} for head in range(count)]
