"""How far two figures rise together, whatever their scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float | None:
    """Spearman's rank correlation; None where one of the two does not change.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """
    one, other = (_ranks(np.asarray(values, dtype=np.float64)) for values in (x, y))
    spread = np.sqrt((one @ one) * (other @ other))
    return float(one @ other / spread) if spread > 0 else None


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks about their mean; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - counts / 2)[inverse] - len(values) / 2
    return ranks
