"""Area under the ROC curve and rank correlation, with bootstrap intervals over heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.support.statistics import LEVEL, Interval

DRAWS = 2000


def ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Ranks from 1 on; ties share their mean rank."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[inverse]


def area(values: Float[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Probability that a positive has a larger value than a negative (ties ½): the area under the ROC curve."""
    n, m = int(positive.sum()), int((~positive).sum())
    if n == 0 or m == 0:
        return float("nan")
    return (float(ranks(values)[positive].sum()) - n * (n + 1) / 2) / (n * m)


def rank_correlation(one: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> float:
    """Spearman's ρ."""
    both = torch.stack((ranks(one), ranks(other)))
    return round(float(torch.corrcoef(both)[0, 1]), 12)


def bootstrapped(statistic: Callable[[Tensor, Tensor], float], one: Tensor, other: Tensor, seed: int = 0) -> Interval:
    """A statistic of paired samples with its 95 % percentile interval; draws in which it is undefined are left out."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(one), (DRAWS, len(one)), generator=generator)
    values = torch.tensor([statistic(one[rows], other[rows]) for rows in drawn], dtype=torch.float64)
    tail = (1 - LEVEL) / 2
    low, high = values[~values.isnan()].quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(statistic(one, other), low, high)
