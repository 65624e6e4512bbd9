"""How estimates agree with measurements of the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keyquery.support.statistics import spearman

POOR = {"rank_correlation": 0.8, "inside": 0.8}  # below, estimates of this model and text are not to be relied on
CELLS = 8  # that a correlation needs to say anything


def agreement(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Rank correlation, slope and coverage over rows with an estimate and a measurement; None if they are too few.

    `slope` is that of the measured change over the estimate, through the origin; `inside` the share of estimates
    within two standard errors of the measurement, or a tenth of it.
    """
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
