"""Student's t: confidence intervals of a mean, quantiles and tails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

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
    mean = sum(each.change for each in intervals) / k
    half = math.hypot(*((each.high - each.low) / 2 for each in intervals)) / k
    return Interval(mean, mean - half, mean + half)


def student(freedom: int, level: float = LEVEL) -> float:
    """Two-sided quantile of Student's t: |T| ≤ t with probability `level`, at ν = `freedom` degrees of freedom.

    Closed forms for ν = 1 and 2, else the expansion in 1/ν about the normal quantile z, accurate to 0.2 %.
    """
    p = (1 + level) / 2
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(1 / (2 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def student_tail(t: float, freedom: int) -> float:
    """P(T ≥ t) of Student's t with an even number ν = `freedom` of degrees of freedom.

    With x = ν/(ν + t²) and c_0 = 1, c_k = c_{k−1}·(2k − 1)/(2k):
    P(|T| ≤ |t|) = √(1 − x)·Σ_k c_k xᵏ over k < ν/2. The sum over all k is 1/√(1 − x), so that the terms from ν/2 on
    give P(|T| > |t|), without cancellation.
    """
    if freedom < 2 or freedom % 2:
        raise ValueError(f"freedom must be even and positive, got {freedom}")
    x, sine = freedom / (freedom + t * t), abs(t) / math.sqrt(freedom + t * t)  # sine = √(1 − x)
    head, term, k = 0.0, 1.0, 0
    while k < freedom // 2:
        head, k = head + term, k + 1
        term *= x * (2 * k - 1) / (2 * k)
    if x > 0.5:
        upper = (1 - sine * head) / 2
    else:
        tail = 0.0
        while term > 1e-16 * tail:
            tail, k = tail + term, k + 1
            term *= x * (2 * k - 1) / (2 * k)
        upper = sine * tail / 2
    return upper if t >= 0 else 1 - upper
