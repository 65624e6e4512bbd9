"""Shares of the variance of scores with standard errors over sequences, from the sums of `ScoreVariance`."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from keyquery.forms import Form
from keyquery.forms.measures import entropy_rank
from keyquery.forms.parts import PARTS
from keyquery.listening.parts.variance import GROUPS, POPULARITY, POSITION, QUERY_ONLY, ScoreVariance


class Estimate(NamedTuple):
    """A value per head, with its standard error over sequences (NaN if there are too few)."""

    value: Float64[Tensor, " heads"]
    error: Float64[Tensor, " heads"]
    freedom: Float64[Tensor, " heads"]  # degrees of freedom of the error


class Spread(NamedTuple):
    """Sampling variance of a value, and its degrees of freedom."""

    variance: Float64[Tensor, " heads"]
    freedom: Float64[Tensor, " heads"]


class Shares(NamedTuple):
    """Estimates by name, and covariances between parts; returned by `score_shares`."""

    estimates: dict[str, Estimate]
    half: dict[str, Estimate]  # over the pairs within the first half of each window
    interactions: dict[str, Float64[Tensor, " heads"]]  # 2·cov(a, b) by "a × b", of the variance of the scores


def score_shares(sums: ScoreVariance) -> Shares:
    """Shares of the parts, `interaction`, `symmetry`, `sink` and ranks of every head.

    Shares of the parts and the interaction sum to 1. Errors come from the influence of each sequence on a
    share, directly and through the means, which come from other sequences.
    """
    if not sums.products:
        raise ValueError("no token pair is at positions that enough sequences reach")
    numbers = sorted(sums.products)
    products = torch.stack([sums.products[number] for number in numbers], 1).cpu()  # (2, sequences, heads, parts²)
    sinks = torch.stack([sums.sinks[number] for number in numbers]).cpu()
    moves = torch.stack([sums.moves[number] for number in sums.moves]).cpu() if len(sums.moves) > 1 else None
    chosen = torch.tensor([number in sums.moves for number in numbers])
    whole, half = (_estimates(sums, of_window, moves, chosen) for of_window in products)
    whole["sink"] = jackknife(sinks[..., None], products[0].sum((-2, -1)))
    if sums.contents is not None:
        whole |= _ranks(sums)
    mean = products[0].mean(0)
    total = _safe(mean.sum((-2, -1)))
    pairs = {
        f"{PARTS[a]} × {PARTS[b]}": (mean[:, a, b] + mean[:, b, a]) / total
        for a in range(len(PARTS))
        for b in range(a + 1, len(PARTS))
    }
    return Shares(whole, half, pairs)


def _estimates(
    sums: ScoreVariance, products: Float64[Tensor, "sequences heads p p"], moves: Tensor | None, chosen: Tensor
) -> dict[str, Estimate]:
    squares, total = products.diagonal(dim1=-2, dim2=-1), products.sum((-2, -1))
    both = products + products.mT
    through = torch.zeros_like(squares)
    if sums.by_position:
        through[..., POSITION] = both[..., POSITION, QUERY_ONLY] + both[..., POSITION, POPULARITY]
        if moves is not None:
            through[chosen, :, POPULARITY], through[chosen, :, QUERY_ONLY] = moves[:, 0], moves[:, 1]
    through /= _safe(total.mean(0))[:, None]
    sequences = int(sums.means.sequences.sum())

    def estimate(function: Callable[[Tensor], Tensor], slope: Tensor) -> Estimate:
        """Estimate a function of the shares, (..., heads, parts); `slope` is its derivative."""
        by_means = _spread((through[chosen] * slope).sum(-1), sequences) if int(chosen.sum()) > 2 else None
        return jackknife(squares, total, function, by_means)

    unit = torch.eye(len(PARTS), dtype=torch.float64)
    out = {name: estimate(itemgetter((..., index)), unit[index]) for index, name in enumerate(PARTS)}
    out["interaction"] = estimate(lambda share: 1 - share.sum(-1), -torch.ones(len(PARTS), dtype=torch.float64))
    out["pairwise"] = estimate(lambda share: share[..., 0] + share[..., 1], unit[0] + unit[1])
    out["symmetry"] = estimate(_symmetry, torch.zeros(len(PARTS), dtype=torch.float64))
    return out


def _symmetry(share: Float64[Tensor, "*batch parts"]) -> Float64[Tensor, "*batch"]:
    """(symmetric − skew)/(symmetric + skew)."""
    return ((share[..., 0] - share[..., 1]) / _safe(share[..., 0] + share[..., 1])).clamp(-1, 1)


def jackknife(
    parts: Float64[Tensor, "sequences heads p"],
    total: Float64[Tensor, "sequences heads"],
    function: Callable[[Tensor], Tensor] = lambda share: share[..., 0],
    by_means: Spread | None = None,
) -> Estimate:
    """Jackknife estimate of a function of the ratios Σ parts/Σ total over sequences.

    `by_means` is the further variance from the sequences that the means were computed on.
    """
    count = len(parts)
    sums = parts.sum(0)
    whole = total.sum(0)
    value = function(sums / _safe(whole)[:, None])
    if count < 3:
        return _without_error(value)
    without = function((sums - parts) / _safe(whole - total)[..., None])
    return _estimate(count * value - (count - 1) * without.mean(0), without, by_means)


def _estimate(value: Tensor, without: Float64[Tensor, "left_out heads"], by_means: Spread | None = None) -> Estimate:
    """A value with its standard error, from its leave-one-out values."""
    count = len(without)
    spread = _spread(-(count - 1) * without, count)
    if by_means is not None:
        variance = spread.variance + by_means.variance
        # Welch–Satterthwaite degrees of freedom of a sum of two variances.
        unsure = spread.variance.square() / spread.freedom + by_means.variance.square() / by_means.freedom
        spread = Spread(variance, variance.square() / _safe(unsure))
    return Estimate(value, spread.variance.sqrt(), spread.freedom)


def _spread(influences: Float64[Tensor, "n heads"], sequences: int) -> Spread:
    """Variance of a mean over `sequences`, from the influence of each of n sequences.

    Its degrees of freedom shrink with the kurtosis of the influences: 2·mean²/variance of the variance.
    """
    count, away = len(influences), influences - influences.mean(0)
    second, fourth = away.square().mean(0), away.pow(4).mean(0)
    excess = (fourth / _safe(second.square()) - 3).clamp(min=0)
    freedom = 2 / (2 / (count - 1) + excess / count)
    return Spread(second * count / (count - 1) / sequences, freedom)


def _without_error(value: Tensor) -> Estimate:
    return Estimate(value, torch.full_like(value, math.nan), torch.zeros_like(value))


def _ranks(sums: ScoreVariance) -> dict[str, Estimate]:
    """Effective ranks of symmetric and skew part, weighted by the covariance of the contents, with jackknife errors."""
    assert sums.contents is not None
    filled = [group for group in range(GROUPS) if sums.tokens[group] > 0]
    contents = sums.contents.cpu()
    whole = torch.stack(_part_ranks(contents.sum(0) / sums.tokens.sum()))
    estimates = [_without_error(ranks) for ranks in whole]
    if len(filled) > 2:
        left = contents.sum(0) - contents[filled]
        tokens = sums.tokens.sum() - sums.tokens[filled]
        without = torch.stack(
            [torch.stack(_part_ranks(moment / count)) for moment, count in zip(left, tokens, strict=True)], 1
        )
        estimates = [_estimate(ranks, those) for ranks, those in zip(whole, without, strict=True)]
    return dict(zip(("effective_rank_symmetric", "effective_rank_skew"), estimates, strict=True))


def _safe(total: Tensor) -> Tensor:
    return torch.where(total > 0, total, 1.0)


def _part_ranks(covariance: Float64[Tensor, "heads n n"]) -> tuple[Tensor, Tensor]:
    """Effective ranks, on data and at offset 0, of the symmetric and of the skew part of every head."""
    form = Form.from_gram(covariance)
    alike, points = form.symmetric_eigenvalues().abs(), form.skew_values()
    return entropy_rank(alike, alike.sum(-1) == 0), entropy_rank(points, points.sum(-1) == 0)
