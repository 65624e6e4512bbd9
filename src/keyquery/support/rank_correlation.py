"""Rank correlation of two variables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float | None:
    """Spearman's rank correlation; None if one of the two is constant."""
    x_ranks, y_ranks = (_ranks(np.asarray(values, dtype=np.float64)) for values in (x, y))
    norm = np.sqrt((x_ranks @ x_ranks) * (y_ranks @ y_ranks))
    return float(x_ranks @ y_ranks / norm) if norm > 0 else None


def _ranks(values: np.ndarray) -> np.ndarray:
    """Centred ranks; tied values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - counts / 2)[inverse] - len(values) / 2
    return ranks
