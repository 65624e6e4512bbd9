"""What a source adds to scores with its tokens in random order: the null level of an attribution."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.instruments.attribution.table import HeadScores
from keyquery.listening.residual.kernels import centred

ORDERS, LEVEL = 100, 0.95  # random orders, and the percentile over them


def null_levels(scores: HeadScores, pair: tuple[int, int] | None) -> dict[str, Float[Tensor, " sources"]]:
    """Per side and source: the 95th percentile of the magnitude of its sum, with its tokens in random order.

    Sums are Σ_ij D_ij q_i·k_j: of one pair, D takes the mean over visible keys off that key; of all pairs, D is the
    scores minus their mean over visible keys, over their sum of squares. Positions, norms and biases stay in place.
    """
    seen = scores.visible
    if pair is None:
        deviation = centred(scores.scores(), seen)
        deviation = deviation / deviation.square().sum().clamp(min=torch.finfo(deviation.dtype).tiny)
    else:
        query, key = pair
        deviation = torch.zeros(seen.shape, dtype=torch.float64, device=seen.device)
        deviation[query] -= seen[query] / seen[query].sum()
        deviation[query, key] += 1
    queries, keys = scores.queries(), scores.keys()
    generator, n = torch.Generator().manual_seed(0), len(seen)
    orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(ORDERS)]).to(seen.device)
    levels = {}
    for side, own, vectors in (
        ("query", queries, deviation @ keys.sum(0)),
        ("key", keys, deviation.mT @ queries.sum(0)),
    ):
        through, sums = scores.pulled(side, vectors)[0], (own * vectors).sum((-2, -1))
        level = []
        for write, whole in zip(scores.values, sums, strict=True):
            products = (through @ write[0].mT).double()  # of places by tokens
            biases = whole - products.trace()  # of queries and keys, in no write
            shuffled = products[torch.arange(n, device=seen.device), orders].sum(-1) + biases
            level.append(shuffled.abs().quantile(LEVEL))
        none = [torch.zeros_like(level[0])] * (scores.bias is not None)  # a position bias has no tokens
        levels[side] = torch.stack(level + none)
    return levels
