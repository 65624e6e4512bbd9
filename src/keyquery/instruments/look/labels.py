"""One label per head: what it needs, by the cost of its parts; without costs, what its weights alone show.

Variance describes scores and gives no label: docs/studies/labels.md shows how little it predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keyquery.instruments.ablation.needs import LABELS as LABELS
from keyquery.instruments.ablation.needs import Cost, need_of
from keyquery.support.checks import check_number


@dataclass(frozen=True)
class Thresholds:
    """Decision thresholds for labels.

    Parameters
    ----------
    loss
        Nats per token: a head needs the smallest set of parts that costs less (upper end of the interval) alone.
        Default: 0.003.
    symmetry
        From the weights alone: |symmetry| from which a head is `symmetric` or `skew`. Default: 0.8.
    positive
        Share of ‖S‖² from which a symmetric head is PSD. Default: 0.95.
    low_rank
        Effective rank over r up to which a head is of low rank. Default: 0.25.
    """

    loss: float = 0.003
    symmetry: float = 0.8
    positive: float = 0.95
    low_rank: float = 0.25

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value)


def label_head(
    weights: Mapping[str, Any],
    on_data: Mapping[str, Any] | None = None,
    costs: Mapping[str, Cost] | None = None,
    evidence: str = "estimated",
    thresholds: Thresholds | None = None,
) -> dict[str, Any]:
    """Label, needs, reason and evidence ("estimated", "measured" or "weights") of a head."""
    limit = thresholds or Thresholds()
    need = need_of(costs or {}, limit.loss, _is_sink(on_data or {}))
    if need is not None:
        return {**need._asdict(), "evidence": evidence}
    symmetry = weights["symmetry"]
    label = "symmetric" if symmetry >= limit.symmetry else "skew" if symmetry <= -limit.symmetry else "undecided"
    return {"label": label, "reason": f"symmetry {symmetry:.2f}, from the weights alone", "evidence": "weights"}


def _is_sink(on_data: Mapping[str, Any]) -> bool:
    """Whether most of the position part is due to the first key."""
    return bool(on_data.get("sink", 0.0) > on_data.get("position", 0.0) / 2 > 0)


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
