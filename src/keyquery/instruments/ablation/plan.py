"""Which cells are measured, by their estimates, and how the two agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.support.statistics import spearman

CHECK = 24  # random cells, stratified by their estimate
LARGE = 0.2  # nats per token: above, estimates are often too small
EFFECTIVE = 4.0  # sequences that an estimate rests on
POOR = {"rank_correlation": 0.8, "inside": 0.8}  # below, estimates of this model and text are not to be relied on
CELLS = 8  # that a correlation needs to say anything


def flags(terms: Float[Tensor, " sequences"]) -> list[str]:
    """Why an estimate may be wrong: it is large, or dominated by few sequences."""
    sizes = terms.abs()
    effective = float(sizes.sum().square() / sizes.square().sum().clamp(min=1e-300))
    reasons = ["large"] if float(terms.mean().abs()) > LARGE else []
    return reasons + (["few sequences"] if 0 < effective < min(EFFECTIVE, len(terms) / 2) else [])


def plan(rows: Sequence[Mapping[str, Any]], measure: str, budget: int, threshold: float) -> tuple[list[int], list[int]]:
    """The numbers of the rows to measure: a random check, and flagged rows and those near the threshold."""
    everything = list(range(len(rows)))
    if measure == "all" or (measure == "auto" and len(rows) <= min(budget, CHECK)):
        return everything, []
    if measure == "none":
        return [], []
    ranked = sorted(everything, key=lambda number: rows[number]["estimate"])
    source = torch.Generator().manual_seed(0)
    strata = torch.linspace(0, len(ranked), min(CHECK, budget) + 1).long().tolist()
    check = [ranked[int(torch.randint(low, high, (1,), generator=source))] for low, high in pairwise(strata)]

    def urgency(number: int) -> tuple[bool, float]:
        row = rows[number]
        half = (row["estimate_high"] - row["estimate_low"]) / 2
        return not row["flags"], abs(row["estimate"] - threshold) / max(half, 1e-12)

    urgent = [number for number in everything if not urgency(number)[0] or urgency(number)[1] <= 1]
    further = sorted(set(urgent) - set(check), key=urgency)
    return check, further[: budget - len(check)]


def agreement(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Estimates against measurements: rank correlation, slope through the origin, and the share within the noise."""
    rows = [row for row in rows if "estimate" in row]
    if len(rows) < CELLS:
        return None
    estimated, measured, low = (
        torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in ("estimate", "change", "low")
    )
    limit = (measured - low) + 0.1 * measured.abs()
    correlation = spearman(estimated.numpy(), measured.numpy())
    figures: dict[str, Any] = {
        "cells": len(rows),
        "rank_correlation": float("nan") if correlation is None else correlation,
        "slope": float((estimated @ measured) / (estimated @ estimated).clamp(min=1e-300)),
        "inside": float(((estimated - measured).abs() <= limit).double().mean()),
    }
    return {**figures, "poor": [name for name, least in POOR.items() if not figures[name] >= least]}
