"""One label per head: the part of its scores that suffices without the others, and the evidence for it.

A label is a prediction that the head's other parts can be ablated. It comes from ablation, if that was run (ablating a
part costs less than a threshold), else from the shares of the variance with their intervals ("variance"), else from
the weights alone. Variance is not importance: docs/studies/labels.md counts how often the two agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from keyquery.support.checks import check_number

LABELS = ("position", "sink", "popularity", "symmetric", "skew", "pairwise", "mixed", "undecided")
PAIRWISE = {"symmetric", "skew"}


@dataclass(frozen=True)
class Thresholds:
    """Decision thresholds for labels.

    Parameters
    ----------
    share
        Share of the variance: a part whose interval lies above is the label; if all lie below, the head is `mixed`.
        Default: 0.6.
    loss
        Nats per token: a part whose ablation costs less (upper end of the interval) is not needed. With 130 windows
        intervals are ±0.002 to ±0.01 wide: a smaller limit leaves most heads undecided. Default: 0.01.
    symmetry
        From the weights alone: |symmetry| from which a head is `symmetric` or `skew`. Default: 0.8.
    positive
        Share of ‖S‖² from which a symmetric head is PSD. Default: 0.95.
    low_rank
        Effective rank over r up to which a head is of low rank. Default: 0.25.
    """

    share: float = 0.6
    loss: float = 0.01
    symmetry: float = 0.8
    positive: float = 0.95
    low_rank: float = 0.25

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value)


class Label(NamedTuple):
    """A label, the reason for it, and its evidence: "ablation", "variance" or "weights"."""

    label: str
    reason: str
    evidence: str


def label_head(
    weights: Mapping[str, Any],
    on_data: Mapping[str, Any] | None = None,
    ablation: Mapping[str, Any] | None = None,
    thresholds: Thresholds | None = None,
) -> Label:
    """Label a head by its metrics."""
    limit = thresholds or Thresholds()
    if on_data is None:
        return _from_weights(weights["symmetry"], limit)
    if ablation:
        from_ablation = _from_ablation(ablation, on_data, limit)
        if from_ablation is not None:
            return from_ablation
    label, reason = _from_variance(on_data, limit)
    if ablation:
        reason += f"; leaving out any one part costs less than {limit.loss:g} nats per token"
    return Label(label, f"{reason} (from variance only)", "variance")


def _from_weights(symmetry: float, limit: Thresholds) -> Label:
    label = "symmetric" if symmetry >= limit.symmetry else "skew" if symmetry <= -limit.symmetry else "undecided"
    return Label(label, f"symmetry {symmetry:.2f}, from the weights alone", "weights")


def _from_ablation(ablation: Mapping[str, Any], on_data: Mapping[str, Any], limit: Thresholds) -> Label | None:
    """By the parts whose ablation raises the loss; None if none does."""
    needed = {part for part, (_, low, _) in ablation.items() if low > limit.loss}
    open_ = {part for part, (_, _, high) in ablation.items() if high > limit.loss} - needed
    costs = ", ".join(f"{part} {ablation[part][0]:+.4f}" for part in ablation if part in needed | open_)
    if open_:
        return Label(
            "undecided",
            f"cost of leaving out, nats per token, with intervals across {limit.loss:g}: {costs}",
            "ablation",
        )
    if not needed:
        return None
    reason = f"leaving out costs, nats per token: {costs}; the other parts cost less than {limit.loss:g}"
    return Label(_needing(needed, on_data), reason, "ablation")


def _needing(needed: set[str], on_data: Mapping[str, Any]) -> str:
    """The label of a head that needs these parts; the query-only part counts as position."""
    if needed <= {"position", "query_only"}:
        return _sink_or_position(on_data)
    if needed == PAIRWISE:
        return "pairwise"
    return needed.pop() if len(needed) == 1 else "mixed"


def _from_variance(on_data: Mapping[str, Any], limit: Thresholds) -> tuple[str, str]:
    shares = {part: on_data[part] for part in ("position", "popularity", "symmetric", "skew") if part in on_data}
    crossed = "symmetric" not in shares  # cross-attention
    shares["pairwise"] = on_data["pairwise"] if crossed else on_data["symmetric"] + on_data["skew"]
    intervals = on_data.get("intervals")
    if intervals is None:  # the closed form has no intervals
        low = high = shares
    elif any(intervals[part] is None for part in shares):
        return "undecided", "too few sequences for an interval"
    else:
        low, high = ({part: intervals[part][end] for part in shares} for end in (0, 1))
    for part in shares:  # pairwise last: only if neither of its two parts suffices
        if low[part] >= limit.share:
            label = _sink_or_position(on_data) if part == "position" else part
            return label, f"{_percent(part, shares, low, high)} of the variance"
    most = max(shares, key=lambda part: shares[part])
    reason = f"largest: {_percent(most, shares, low, high)} of the variance"
    return ("mixed" if all(high[part] < limit.share for part in shares) else "undecided"), reason


def _percent(part: str, value: Mapping[str, float], low: Mapping[str, float], high: Mapping[str, float]) -> str:
    between = "" if low is high else f" ({low[part]:.0%} to {high[part]:.0%})"
    return f"{part} {value[part]:.0%}{between}"


def _sink_or_position(on_data: Mapping[str, Any]) -> str:
    """`sink` if most of the position part is due to the first key."""
    return "sink" if on_data.get("sink", 0.0) > on_data["position"] / 2 > 0 else "position"


def properties(
    weights: Mapping[str, Any],
    on_data: Mapping[str, Any] | None,
    rank: int,
    thresholds: Thresholds | None = None,
) -> list[str]:
    """Further properties of a head: "psd", "low rank 7", "split 12:30" (effective ranks that fit its width)."""
    limit = thresholds or Thresholds()
    names = []
    if weights["symmetry"] >= limit.symmetry and weights["positive_share"] >= limit.positive:
        names.append("psd")
    if weights["effective_rank"] <= limit.low_rank * rank:
        names.append(f"low rank {max(round(weights['effective_rank']), 1)}")
    if on_data is not None and "effective_rank_symmetric" in on_data:
        symmetric, skew = (round(on_data[f"effective_rank_{part}"]) for part in ("symmetric", "skew"))
        if symmetric + skew <= rank:
            names.append(f"split {symmetric}:{skew}")
    return names
