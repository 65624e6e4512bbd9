"""Metrics of heads on data: shares of the variance of their scores, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keyquery.checkpoints import Heads, Layer
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.sample import Sample
from keyquery.listening import typical_length
from keyquery.listening.inputs.data import Prepared
from keyquery.listening.parts.on_data import SEQUENCES, rows_of, score_variances
from keyquery.listening.parts.shares import Estimate, score_shares
from keyquery.listening.parts.variance import ScoreVariance
from keyquery.support.progress import Progress
from keyquery.support.statistics import student

SHARES = (*PARTS, "interaction", "symmetry")
CROSS = ("popularity", "query_only", "position", "interaction", "sink")  # of cross-attention, besides "pairwise"
SQUARES = (*PARTS, "pairwise", "sink")


@dataclass(frozen=True)
class OnData:
    """Statistics from running the model on data; empty without data."""

    sums: Mapping[int, ScoreVariance] = field(default_factory=dict)  # by layer
    facts: Mapping[str, Any] | None = None
    sample: Sample | None = None

    @classmethod
    def of(cls, prepared: Prepared, longest: int, heads: Heads, sample: Sample | None, watching: Progress) -> OnData:
        """Run the model on windows of at most `longest` tokens."""
        if not any(layer.kind == "self" for layer in heads):
            raise ValueError("only self-attention is analysed on data, and this model has none: omit text and inputs")
        batches = prepared.batches
        sums = score_variances(
            prepared.model, batches, heads, lambda some: watching(some, "running the model", len(some))
        )
        # Sequences are often much shorter than the longest window; inputs are not cut, and may be longer.
        typical = typical_length(batches)
        if typical is None:  # images, sounds and inputs of other names
            typical = longest = max(of_layer.longest for of_layer in sums.values())
        facts = {"sequences": sum(map(rows_of, batches)), "length": typical, "longest": max(longest, typical)}
        return cls(sums, _described(sums, {**facts, "from": prepared.origin}), sample)

    def of_layer(self, layer: Layer) -> list[dict[str, Any] | None]:
        """Metrics of each head of a layer; None without data."""
        return [*_metrics(self.sums[layer.index])] if layer.index in self.sums else [None] * layer.heads

    def scores(self, layer: Layer, heads: Heads) -> list[dict[str, Any]]:
        """Scores of every head on the sample's tokens, by part; none without a sample."""
        if self.sample is None or layer.index not in self.sample.projected or layer.index not in self.sums:
            return []
        sums = self.sums[layer.index]
        return [{"scores": of_head} for of_head in self.sample.scores(layer, heads, sums.means, sums.by_position)]


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
    means = "by position" if first.by_position else "over all positions"
    note = {"note": "; ".join(notes)} if notes else {}
    return {"tokens": int(first.tokens.sum()), **facts, "means": means, **note}


def _metrics(sums: ScoreVariance) -> list[dict[str, Any]]:
    """Metrics of each head; two sequences have a pairwise part in place of symmetric and skew."""
    shares = score_shares(sums)
    estimates = shares.estimates
    if sums.is_cross:
        estimates = {"pairwise": estimates["symmetric"], **{name: estimates[name] for name in CROSS}}
    rows: list[dict[str, Any]] = []
    for head in range(len(estimates["sink"].value)):
        values = {name: float(estimate.value[head]) for name, estimate in estimates.items()}
        row: dict[str, Any] = {
            "intervals": {name: interval(one, head, square=name in SQUARES) for name, one in estimates.items()},
            "interactions": {name: float(value[head]) for name, value in shares.interactions.items()},
        }
        if sums.is_cross:
            pairs = row["interactions"].items()
            row["interactions"] = {
                name.replace("symmetric", "pairwise"): value for name, value in pairs if "skew" not in name
            }
        else:
            values.pop("pairwise")
            row["half_window"] = {name: float(shares.half[name].value[head]) for name in SHARES}
            changes = values["symmetry"] * row["half_window"]["symmetry"] < 0
            row["changes_with_window"] = ["symmetry"] if changes else []
        rows.append({**values, **row})
    return rows


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
