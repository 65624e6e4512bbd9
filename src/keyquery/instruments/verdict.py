"""A verdict for each head: which kernel would do, and why; never more certain than the figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Thresholds:
    """From where on a figure decides. A head that reaches none of them is `general`."""

    popularity: float = 0.6  # share of the variance on data
    symmetry: float = 0.8  # |symmetry| from which the other part is left out
    positive: float = 0.95  # share of ‖S‖² from which a symmetric head is PSD
    low_rank: float = 0.25  # effective rank over r, up to which a head is of low rank


def verdict(
    weights: Mapping[str, Any], on_data: Mapping[str, Any] | None, rank: int, thresholds: Thresholds | None = None
) -> tuple[str, str]:
    """The verdict and its reason, from a head's figures: on data where there are any, else from its weights alone.

    >>> verdict({"symmetry": 0.95, "positive_share": 0.99, "effective_rank": 40.0}, None, rank=64)
    ('psd', 'symmetry 0.95 and 99 % of S positive, from the weights alone')
    """
    limit = thresholds or Thresholds()
    source = "from the weights alone" if on_data is None else "on data"
    if on_data is not None and on_data["popularity"] >= limit.popularity:
        return "popularity", f"{on_data['popularity']:.0%} of its variance on data is keys that everyone looks at"
    symmetry = weights["symmetry"] if on_data is None else on_data["symmetry"]
    if symmetry >= limit.symmetry:
        positive = weights["positive_share"]
        if positive >= limit.positive:
            return "psd", f"symmetry {symmetry:.2f} and {positive * 100:.0f} % of S positive, {source}"
        return "symmetric", f"symmetry {symmetry:.2f}, {source}"
    if symmetry <= -limit.symmetry:
        return "skew", f"symmetry {symmetry:.2f}, {source}"
    if weights["effective_rank"] <= limit.low_rank * rank:
        count = max(round(weights["effective_rank"]), 1)
        return f"low rank {count}", f"effective rank {weights['effective_rank']:.1f} of {rank}, from the weights"
    if on_data is not None:
        alike, points = (round(on_data[f"effective_rank_{part}"]) for part in ("symmetric", "skew"))
        if alike + points <= rank:
            ranks = f"effective ranks {alike} and {points}"
            return f"split {alike}:{points}", f"{ranks} of its parts on data fit into {rank} dimensions"
    return "general", f"symmetry {symmetry:.2f} and no part that could be left out, {source}"
