"""What running a model on data says of its heads: shares of the variance of their scores, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float64
from torch import Tensor, nn

from keyquery.capture import Batch, Moments, joint_moments, typical_length
from keyquery.capture.scores.on_data import SEQUENCES, rows_of, score_variances
from keyquery.capture.scores.shares import Estimate, score_shares
from keyquery.capture.scores.variance import ScoreVariance
from keyquery.checkpoints import Heads, Layer
from keyquery.forms.parts import PARTS
from keyquery.forms.shares import Visible, part_ranks, shares
from keyquery.instruments.look.sample import Sample
from keyquery.support.progress import Progress
from keyquery.support.statistics import student

PAIRS = ("visible", "independent")
SHARES = (*PARTS, "interaction", "symmetry")
SQUARES = (*PARTS, "pairwise", "sink")


@dataclass(frozen=True)
class OnData:
    """What running the model gave: nothing, unless there was data."""

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
        """Run the model; `facts` say the longest window, where the data are from, and which pairs count."""
        if not any(layer.kind == "self" for layer in heads):
            raise ValueError("on data only self-attention is split, and this model has none: leave text and inputs out")
        # Offsets on data are those that occur, often far fewer than the longest window has.
        length = min(facts["longest"], typical_length(batches) or facts["longest"])
        described = {"sequences": sum(map(rows_of, batches)), "length": length, **facts}
        if facts["pairs"] == "independent":
            moments = joint_moments(model, watching(batches, "running the model", len(batches)), heads)
            count = next(iter(moments.values())).count
            return cls(moments=moments, facts={"tokens": count, **described}, sample=sample)
        sums = score_variances(model, batches, heads, lambda some: watching(some, "running the model", len(some)))
        return cls(sums=sums, facts=_described(sums, described), sample=sample)

    def of_layer(self, layer: Layer, heads: Heads) -> list[dict[str, Any] | None]:
        """The figures of each head of a layer; None without data, or for cross-attention."""
        if layer.index in self.sums:
            return _measured(self.sums[layer.index])
        if layer.index in self.moments:
            return _closed_form(layer, heads, self.moments[layer.index], (self.facts or {})["length"])
        return [None] * layer.heads

    def scores(self, layer: Layer, heads: Heads) -> list[dict[str, Any]] | None:
        """Every head's scores on the sample's tokens, in parts; None without a sample."""
        if self.sample is None or layer.index not in self.sample.projected or layer.index not in self.sums:
            return None
        return self.sample.scores(layer, heads, self.sums[layer.index].means, self.sums[layer.index].by_position)


def _described(sums: Mapping[int, ScoreVariance], facts: dict[str, Any]) -> dict[str, Any]:
    """What the shares are of, and what must be known to read them."""
    some = next(iter(sums.values()))
    notes = []
    if not some.by_position:
        notes.append(
            f"{facts['sequences']} sequences are too few for means by position, which need {SEQUENCES}: means are over "
            "all positions, and learned positions count as popularity"
        )
    if some.left_out:
        share = some.left_out / (some.left_out + some.pairs)
        notes.append(f"{share:.0%} of the visible pairs are left out: too few sequences reach their positions")
    tokens = int(some.tokens.sum())
    kind = "by position" if some.by_position else "over all positions"
    return {"tokens": tokens, **facts, "means": kind, **({"note": "; ".join(notes)} if notes else {})}


def _measured(sums: ScoreVariance) -> list[dict[str, Any] | None]:
    found = score_shares(sums)
    heads = len(found.estimates["skew"].value)
    rows: list[dict[str, Any] | None] = []
    for head in range(heads):
        own = {name: float(estimate.value[head]) for name, estimate in found.estimates.items() if name != "pairwise"}
        half = {name: float(found.half[name].value[head]) for name in SHARES}
        intervals = {
            name: interval(estimate, head, square=name in SQUARES) for name, estimate in found.estimates.items()
        }
        unstable = [name for name in ("symmetry",) if own[name] * half[name] < 0]
        pairs = {name: float(value[head]) for name, value in found.interactions.items()}
        rows.append(
            {**own, "intervals": intervals, "half_window": half, "sign_changes": unstable, "interactions": pairs}
        )
    return rows


def interval(estimate: Estimate, head: int, square: bool = False) -> list[float] | None:
    """The 95 % interval of one head's estimate; None where there were too few sequences.

    `square`: the number is a sum of squares. The larger one is, the larger its error, so that the interval is one of
    its logarithm, unless it is too near 0 for that.
    """
    value, error, freedom = (float(number[head]) for number in estimate)
    if not math.isfinite(error) or freedom < 1:
        return None
    half = student(int(freedom)) * error
    if square and half < value / 2:
        return [value * math.exp(-half / value), value * math.exp(half / value)]
    return [value - half, value + half]


def _closed_form(layer: Layer, heads: Heads, moments: Moments, length: int) -> list[dict[str, Any] | None]:
    """Shares over independent tokens: what follows from the covariance of queries and keys alone."""
    visible = Visible(length, layer.causal, layer.window)
    bias = heads.position_bias(layer, visible.offsets())
    mean, covariance = moments.mean.cpu(), moments.covariance.cpu()  # small, whatever the model runs on
    numbers = shares(mean, covariance, layer.scale, visible, layer.rope, None if bias is None else bias.cpu())
    symmetric, skew = part_ranks(covariance)
    numbers |= {"effective_rank_symmetric": symmetric, "effective_rank_skew": skew}
    return list(by_head(numbers, 1))


def by_head(numbers: Mapping[str, Float64[Tensor, "*batch"] | Tensor], batch: int) -> list[dict[str, Any]]:
    """Numbers with a batch of one or two dimensions, head by head."""
    flat = {name: number.flatten(0, batch - 1).tolist() for name, number in numbers.items()}
    count = len(next(iter(flat.values())))
    return [{name: values[head] for name, values in flat.items()} for head in range(count)]
