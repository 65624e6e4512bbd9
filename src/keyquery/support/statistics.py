"""Confidence intervals of a mean by Student's t, and rank correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean change and its 95 % confidence interval."""

    change: float
    low: float
    high: float


def paired(before: Float[Tensor, " n"], after: Float[Tensor, " n"]) -> Interval:
    """The mean of after − before, d̄ ± t·s/√n, over n independent pairs."""
    if len(before) < 2:
        raise ValueError(f"an interval needs at least 2 pairs, got {len(before)}")
    differences = after.cpu().double() - before.cpu().double()
    mean, n = float(differences.mean()), len(differences)
    half = student(n - 1) * float(differences.std()) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def together(intervals: Sequence[Interval]) -> Interval:
    """The interval of the mean of k independent changes, with half-width √(Σ h²)/k of their half-widths h."""
    k = len(intervals)
    mean = sum(interval.change for interval in intervals) / k
    half = math.hypot(*((interval.high - interval.low) / 2 for interval in intervals)) / k
    return Interval(mean, mean - half, mean + half)


def student(freedom: int, level: float = LEVEL) -> float:
    """Two-sided quantile of Student's t: |T| ≤ t with probability `level`."""
    from scipy.special import stdtrit  # a fifth of a second that importing keyquery does not need

    return float(stdtrit(freedom, (1 + level) / 2))


def student_tail(t: float, freedom: int) -> float:
    """P(T ≥ t) of Student's t."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float | None:
    """Spearman's rank correlation; None if one of the two is constant."""
    from scipy.stats import spearmanr

    constant = any(np.ptp(np.asarray(values, dtype=np.float64)) == 0 for values in (x, y))
    return None if constant else float(spearmanr(x, y).statistic)
