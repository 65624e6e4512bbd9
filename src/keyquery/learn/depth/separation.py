"""Separation ranks: how strongly a linear-attention network models dependence between two halves of its tokens.

The network has no softmax, MLP or residual: y_i = Σ_h W_O Σ_j ⟨W_Q x_i, W_K x_j⟩ W_V x_j per layer. Its separation rank
is the least R with y = Σ_r g_r(first half) h_r(second half).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from keyquery.support.checks import check_count

PRIME = 33554393  # products of two numbers below it, and sums of 8,192 such products, fit into 63 bits
LARGEST = 1023  # rank that is computed; elimination is cubic
START = 32  # initial points per half, if no bound is known
PIECE = 2**20  # entries of sequences processed at a time


def separation_rank(layers: int, width: int, heads: int = 1, tokens: int = 2, seed: int = 0) -> int:
    """Separation rank of a linear-attention network with generic weights, tokens split into halves.

    The matrix E[a, b] = y₁(U_a, V_b) of random halves U, V, with random weights modulo a prime p, is eliminated
    exactly. The result is never above the true rank, and below it with probability at most R·(3^(L+1) − 2)/p for all
    but a few primes. For two tokens the rank is at most binom(d + C, C) with C = (3^L − 1)/2 (`rank_of_two`): a result
    equal to that is proven. Ranks above 1,023 are refused.

    Parameters
    ----------
    layers, width
        Depth L and width d of the network.
    heads
        Number of heads; must divide `width`. Default: 1.
    tokens
        Number of tokens, even. Default: 2.
    seed
        Seed of the random weights and inputs. Default: 0.

    Returns
    -------
    int
        The separation rank.

    Examples
    --------
    >>> kq.separation_rank(1, 4), kq.separation_rank(2, 3), kq.separation_rank(2, 3, tokens=4)
    (5, 35, 49)
    """
    for name, value in (("layers", layers), ("width", width), ("heads", heads)):
        check_count(name, value)
    if width % heads:
        raise ValueError(f"heads must divide width: {heads} does not divide {width}")
    check_count("tokens", tokens, least=2)
    check_count("seed", seed, least=0)
    if tokens % 2:
        raise ValueError(f"tokens must be even, to split into halves, got {tokens}")
    bound = rank_of_two(layers, width) if layers < 8 else math.inf
    too_large = f"the separation rank of {layers} layers of width {width} may be above {LARGEST:,}, the limit"
    if bound > LARGEST:
        raise ValueError(too_large)
    rng = np.random.default_rng(seed)
    weights = [rng.integers(0, PRIME, (4, heads, width // heads, width)) for _ in range(layers)]
    halves = rng.integers(0, PRIME, (2, LARGEST + 1, tokens // 2, width))
    points = min(int(bound) + 1 if tokens == 2 else START, LARGEST + 1)
    while (rank := _rank(_outputs(weights, halves[0, :points], halves[1, :points]))) == points:
        if points > LARGEST:
            raise ValueError(too_large)
        points = min(2 * points, LARGEST + 1)
    return rank


def rank_of_two(layers: int, width: int) -> int:
    """binom(d + C, C) with C = (3^L − 1)/2: the largest separation rank of L layers of width d on two tokens.

    y₁ has terms of degrees 3^L − 2k in its own token and 2k in the other. Those of one pair of degrees have at most as
    many independent ones as the smaller degree has monomials; the smaller degrees run through 0, …, C, each once.
    """
    order = (3**layers - 1) // 2
    return math.comb(width + order, min(order, width))


def log_rank_of_two(layers: int, width: int) -> float:
    """log₃ of `rank_of_two`, for shapes whose rank would overflow."""
    order = layers * math.log(3) + math.log1p(-(3.0**-layers)) - math.log(2)  # ln C
    few, many = sorted((order, math.log(width)))
    # binom(m + n, n) = Π_i (1 + m/i) over i = 1, …, n, the smaller of both.
    below = np.log(np.arange(1, round(math.exp(few)) + 1))
    return float(np.logaddexp(0.0, many - below).sum() / math.log(3))


def _outputs(weights: list[Any], first: Int64[ndarray, "m n d"], second: Int64[ndarray, "m n d"]) -> Any:
    """E[a, b]: the first component of the first output token for halves a and b."""
    blocks = []
    for chunk in np.array_split(first, -(-2 * first.size * len(second) // PIECE)):
        x = np.concatenate(np.broadcast_arrays(chunk[:, None], second), 2)
        for heads in weights:
            out = np.zeros_like(x)
            for query, key, value, output in heads.swapaxes(0, 1):
                q, k, v = (x @ part.T % PRIME for part in (query, key, value))
                out = (out + (q @ k.swapaxes(-1, -2) % PRIME @ v % PRIME) @ output) % PRIME
            x = out
        blocks.append(x[:, :, 0, 0])
    return np.concatenate(blocks)


def _rank(matrix: Int64[ndarray, "m m"]) -> int:
    """Rank by exact Gaussian elimination modulo a prime."""
    rows, rank = matrix.copy(), 0
    for column in range(rows.shape[1]):
        nonzero = np.flatnonzero(rows[rank:, column])
        if not len(nonzero):
            continue
        rows[[rank, rank + nonzero[0]]] = rows[[rank + nonzero[0], rank]]
        lead = rows[rank, column:] * pow(int(rows[rank, column]), -1, PRIME) % PRIME
        rest = rows[rank + 1 :]
        rest[:, column:] = (rest[:, column:] - rest[:, column, None] * lead) % PRIME
        rank += 1
        if rank == len(rows):
            break
    return rank
