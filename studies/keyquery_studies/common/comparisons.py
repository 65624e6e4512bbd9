"""Paired comparisons over seeds, and Holm's correction for many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keyquery.support.statistics import paired


def difference(rows: Sequence[Mapping[str, Any]], control: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The mean of `name` less that of the control, over the seeds of both, with its 95 % interval and p-value.

    The interval and p (paired t-test) are None for fewer than two seeds; all is None if a training diverged.
    """
    values, base = ({row["seed"]: row[name] for row in group} for group in (rows, control))
    seeds = sorted(values.keys() & base.keys())
    pairs = [(base[seed], values[seed]) for seed in seeds]
    if not pairs or any(None in pair for pair in pairs):
        return {"change": None, "low": None, "high": None, "p": None, "seeds": len(seeds)}
    before, after = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    if len(pairs) < 2:
        return {"change": float(after - before), "low": None, "high": None, "p": None, "seeds": 1}
    from scipy.stats import ttest_rel

    interval = paired(before, after)
    p = ttest_rel(after, before).pvalue
    return {**interval._asdict(), "p": float(p), "seeds": len(seeds)}


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: below α where the hypothesis is rejected at family-wise error α."""
    order = sorted(range(len(p)), key=p.__getitem__)
    adjusted, highest = [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = highest
    return adjusted


def corrected(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `difference` with `corrected`, p by Holm over all of them that have one."""
    adjusted = iter(holm([row["p"] for row in rows if row["p"] is not None]))
    return [{**row, "corrected": None if row["p"] is None else next(adjusted)} for row in rows]


def shown(row: Mapping[str, Any], digits: int = 2, scale: float = 1.0) -> str:
    """A row of `corrected` as text."""
    change, low, high = (f"{scale * row[key]:+z.{digits}f}" for key in ("change", "low", "high"))
    p = "p < .001" if row["corrected"] < 5e-4 else f"p {row['corrected']:.{3 if row['corrected'] < 0.1 else 2}f}"
    return f"{change} [{low}, {high}], {p}"
