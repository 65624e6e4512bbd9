"""Tests of conditional independence: what they share, and partial correlations."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtri

from keyquery.learn.discovery.pag import members

# Residual variance, relative to 1, below which a variable counts as determined by others; also the eigenvalue cutoff of
# pseudo-inverses. Far above the float32 rounding of equal rows.
TOLERANCE = 1e-9
TINY = float(np.finfo(float).tiny)
CACHED = 1 << 20  # results; for a graph of a thousand nodes not all would fit into memory


class Query(NamedTuple):
    """Are x and y independent given the nodes of a mask?"""

    x: int  # a node
    y: int  # another node
    given: int  # mask of the conditioning set


class IndependenceTest(ABC):
    """A test of conditional independence: pairs whose `statistic` is below the threshold count as independent."""

    def __init__(self, count: int, threshold: float, most: int | None = None) -> None:
        self.count, self.threshold = count, threshold
        self.most = max(0, count - 2 if most is None else most)  # largest conditioning set
        self.by_size = Counter[int]()  # tests by size of the conditioning set
        self._known, self._asked = dict[Query, float](), set[Query]()  # results, and those that were asked for

    def prepare(self, queries: Iterable[Query]) -> None:  # noqa: B027  # most are cheap, and many are never asked for
        """Nothing to precompute."""

    def statistic(self, query: Query) -> float:
        """The strength of a dependence, counted as a test the first time."""
        if query not in self._asked:
            self._asked.add(query)
            self.by_size[query.given.bit_count()] += 1
            self._known[query] = self._known[query] if query in self._known else self.strength(query)
        return self._known[query]

    @abstractmethod
    def strength(self, query: Query) -> float:
        """The statistic of one test."""


class PartialCorrelation(IndependenceTest):
    """Fisher's z of partial correlations, z = ½ ln((1+ρ)/(1−ρ)); independent if √(n−|Z|−3)·|z| is below its quantile.

    ρ is the correlation of the residuals of x and y given Z: C_xy − C_xZ C_ZZ⁺ C_Zy.
    """

    def __init__(self, correlation: Float[ndarray, "n n"], samples: float, alpha: float) -> None:
        count = len(correlation)
        rank = int((np.linalg.eigvalsh(correlation) > TOLERANCE * count).sum()) if count else 0
        # Larger sets determine x or y, or leave only a common residual.
        super().__init__(count, -float(ndtri(alpha / 2)), min(count - 2, rank - 2, math.ceil(samples) - 4))
        self.correlation, self.samples = correlation, samples

    def prepare(self, queries: Iterable[Query]) -> None:
        """Compute queries not in the cache, batched by size of the set."""
        if len(self._known) > CACHED:
            self._known.clear()
            self._asked.clear()
        by_size: dict[int, list[Query]] = {}
        for query in queries:
            if query not in self._known:
                by_size.setdefault(query.given.bit_count(), []).append(query)
        for size, batch in by_size.items():
            rho = self.partial([query[:2] for query in batch], [members(query.given) for query in batch])
            free = self.samples - size - 3
            with np.errstate(divide="ignore"):
                strength = np.arctanh(np.minimum(np.abs(rho), 1.0)) * math.sqrt(max(free, 0.0))
            strength = np.where((np.abs(rho) >= 1) | (free <= 0), math.inf, strength)
            self._known.update(zip(batch, strength.tolist(), strict=True))

    def strength(self, query: Query) -> float:
        """√(n−|Z|−3)·|z| of one test."""
        self.prepare([query])
        return self._known[query]

    def partial(self, pairs: Sequence[tuple[int, int]], given: Sequence[Sequence[int]]) -> Float[ndarray, " k"]:
        """Partial correlations of pairs given sets of one size; 1 where the set determines x or y."""
        C = self.correlation
        x, y = np.array(pairs).T
        if not len(given[0]):
            return C[x, y]
        order = np.concatenate([np.array(given), x[:, None], y[:, None]], 1)
        blocks = C[order[:, :, None], order[:, None, :]]
        try:
            lower = np.linalg.cholesky(blocks)
        except np.linalg.LinAlgError:
            return _by_pseudo_inverse(blocks)
        pivots = np.square(np.diagonal(lower, axis1=1, axis2=2))
        left_y = lower[:, -1, -2] ** 2 + lower[:, -1, -1] ** 2
        rho = lower[:, -1, -2] / np.sqrt(left_y)
        if (doubtful := np.minimum(pivots[:, :-1].min(1), left_y) <= TOLERANCE).any():
            rho[doubtful] = _by_pseudo_inverse(blocks[doubtful])
        return rho


def _by_pseudo_inverse(blocks: Float[ndarray, "k m m"]) -> Float[ndarray, " k"]:
    """Partial correlations of the last two of each block given the others; blocks may be singular."""
    inner, cross, pair = blocks[:, :-2, :-2], blocks[:, :-2, -2:], blocks[:, -2:, -2:]
    inverse = np.linalg.pinv(inner, rcond=TOLERANCE, hermitian=True)
    left = pair - cross.swapaxes(1, 2) @ inverse @ cross
    variance = np.diagonal(left, axis1=1, axis2=2)
    scale = np.sqrt(np.maximum(variance.prod(1), TOLERANCE**2))
    return np.where(variance.min(1) <= TOLERANCE, 1.0, left[:, 0, 1] / scale)


def correlation_of(rows: Float[ndarray, "n m"]) -> Float[ndarray, "n n"]:
    """The correlation of centred variables; of attention A that of D⁻¹AAᵀD⁻¹, D = diag(A), as D⁻¹ only scales rows."""
    rows = rows.astype(np.float64)
    rows = rows / np.maximum(np.abs(rows).max(1, keepdims=True), TINY)  # squares of small numbers would underflow
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), TINY)
    correlation = np.clip(rows @ rows.T, -1.0, 1.0)
    np.fill_diagonal(correlation, 1.0)
    return correlation
