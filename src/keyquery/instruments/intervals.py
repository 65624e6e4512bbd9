"""Intervals: how sure a mean of differences is."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Interval(NamedTuple):
    """A mean change and the ends of its 95 % interval."""

    change: float
    low: float | None
    high: float | None


def paired(before: Float[Tensor, " n"], after: Float[Tensor, " n"]) -> Interval:
    """The mean of after − before, each compared with itself; Student's interval, None for a single pair.

    >>> import torch
    >>> paired(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 3.0, 5.0])).change
    1.3333...
    """
    differences = (after - before).double()
    change, count = float(differences.mean()), len(differences)
    if count < 2:
        return Interval(change, None, None)
    half = student(count - 1) * float(differences.std()) / math.sqrt(count)
    return Interval(change, change - half, change + half)


def student(freedom: int, share: float = 0.95) -> float:
    """Between minus and plus this lies a share of Student's t; exact for 1 and 2 degrees of freedom.

    Beyond, the expansion in 1/ν around the normal quantile, to 1/ν⁴: three digits at ν = 3, more above.

    >>> [round(student(freedom), 3) for freedom in (1, 2, 10, 100)]
    [12.706, 4.303, 2.228, 1.984]
    """
    tail = (1 + share) / 2
    if freedom == 1:
        return math.tan(math.pi * (tail - 0.5))
    if freedom == 2:
        return (2 * tail - 1) / math.sqrt(2 * tail * (1 - tail))
    z = NormalDist().inv_cdf(tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
