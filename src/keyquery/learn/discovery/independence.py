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
CACHED = 1 << 20  # results; for a graph of a thousand nodes not all would fit into memory


class Query(NamedTuple):
    """Are x and y independent given the nodes of a mask?"""

    x: int  # a node
    y: int  # another node
    given: int  # mask of the conditioning set


class IndependenceTest(ABC):
    """A test of conditional independence: pairs whose `statistic` is below the threshold count as independent.

    Subclasses compute the `strength` of a dependence; results are counted, and cached.
    """

    def __init__(self, count: int, threshold: float, most: int | None = None) -> None:
        self.count, self.threshold = count, threshold
        self.most = max(0, count - 2 if most is None else most)  # largest conditioning set
        self.tests, self.by_size = 0, Counter[int]()
        self._known: dict[Query, float] = {}

    def prepare(self, queries: Iterable[Query]) -> None:  # noqa: B027  # most are cheap, and many are never asked for
        """Nothing to precompute."""

    def statistic(self, query: Query) -> float:
        """The strength of a dependence, counted as a test the first time."""
        if query not in self._known:
            self.tests += 1
            self.by_size[query.given.bit_count()] += 1
            self._known[query] = self.strength(query)
        return self._known[query]

    @abstractmethod
    def strength(self, query: Query) -> float:
        """The statistic of one test."""


class ProbabilityTest(IndependenceTest):
    """A test by its p-value: the statistic is −ln p, the threshold −ln alpha.

    A test that says nothing, since Z determines x or y or leaves too few rows, has p = 0: the pair stays adjacent.
    """

    def __init__(self, count: int, alpha: float) -> None:
        super().__init__(count, -math.log(alpha))

    def strength(self, query: Query) -> float:
        """−ln p of one test; where x and y are dependent, at most that."""
        p = self.decisive(query)
        return -math.log(p) if p > 0 else math.inf

    def decisive(self, query: Query) -> float:
        """The p-value, or where it is below alpha, a bound of it that is below alpha too."""
        return self.probability(query)

    @abstractmethod
    def probability(self, query: Query) -> float:
        """The p-value of one test."""


class PartialCorrelation(IndependenceTest):
    """Fisher's z of partial correlations, z = ½ ln((1+ρ)/(1−ρ)); independent if √(n−|Z|−3)·|z| is below its quantile.

    ρ is the correlation of the residuals of x and y given Z: C_xy − C_xZ C_ZZ⁺ C_Zy. If Z determines x or y (residual
    variance below TOLERANCE), the pair counts as dependent.

    >>> C = np.array([[1, 0.5, 0.25], [0.5, 1, 0.5], [0.25, 0.5, 1]])   # a chain 0 – 1 – 2
    >>> test = PartialCorrelation(C, samples=768, alpha=0.01)
    >>> [test.statistic(query) < test.threshold for query in (Query(0, 2, 0), Query(0, 2, 0b010))], test.tests
    ([False, True], 2)
    """

    def __init__(self, correlation: Float[ndarray, "n n"], samples: float, alpha: float) -> None:
        count = len(correlation)
        rank = int((np.linalg.eigvalsh(correlation) > TOLERANCE * count).sum()) if count else 0
        # Larger sets determine x or y, or leave only a common residual.
        super().__init__(count, -float(ndtri(alpha / 2)), min(count - 2, rank - 2, math.ceil(samples) - 4))
        self.correlation, self.samples = correlation, samples
        self._prepared: dict[Query, float] = {}

    def prepare(self, queries: Iterable[Query]) -> None:
        """Compute queries not in the cache, batched by size of the set."""
        if len(self._prepared) > CACHED:
            self._prepared.clear()
            self._known.clear()
        by_size: dict[int, list[Query]] = {}
        for query in queries:
            if query not in self._prepared:
                by_size.setdefault(query.given.bit_count(), []).append(query)
        for size, queries_of_size in by_size.items():
            rho = self.partial([(q.x, q.y) for q in queries_of_size], [members(q.given) for q in queries_of_size])
            free = self.samples - size - 3
            with np.errstate(divide="ignore"):
                strength = np.arctanh(np.minimum(np.abs(rho), 1.0)) * math.sqrt(max(free, 0.0))
            strength = np.where((np.abs(rho) >= 1) | (free <= 0), math.inf, strength)
            self._prepared.update(zip(queries_of_size, strength.tolist(), strict=True))

    def strength(self, query: Query) -> float:
        """√(n−|Z|−3)·|z| of one test."""
        if query not in self._prepared:
            self.prepare([query])
        return self._prepared[query]

    def partial(self, pairs: Sequence[tuple[int, int]], given: Sequence[Sequence[int]]) -> Float[ndarray, " k"]:
        """Partial correlations of pairs given sets of one size; 1 where the set determines x or y."""
        C = self.correlation
        x, y = np.array(pairs).T
        size = len(given[0])
        if size == 0:
            return C[x, y]
        if size == 1:
            z = np.array(given)[:, 0]
            left_x, left_y = 1 - C[x, z] ** 2, 1 - C[y, z] ** 2
            scale = np.sqrt(np.maximum(left_x * left_y, TOLERANCE**2))
            return np.where(np.minimum(left_x, left_y) > TOLERANCE, (C[x, y] - C[x, z] * C[y, z]) / scale, 1.0)
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


def correlation_of(attention: Float[ndarray, "n m"]) -> Float[ndarray, "n n"]:
    """The correlation of C = D⁻¹AAᵀD⁻¹, D = diag(A), where any scaling of rows, such as D⁻¹, cancels."""
    rows = attention.astype(np.float64)
    rows = rows / np.abs(rows).max(1, keepdims=True)  # avoids underflow of squares
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return as_correlation(rows @ rows.T)


def as_correlation(products: Float[ndarray, "n n"]) -> Float[ndarray, "n n"]:
    """Products of standardised vectors without what rounding did: within ±1, and 1 on the diagonal."""
    correlation = np.clip(products, -1.0, 1.0)
    np.fill_diagonal(correlation, 1.0)
    return correlation
