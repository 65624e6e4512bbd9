"""Tests of independence between columns of a table: contingency tables, regressions, and kernels."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.special import chdtrc, gammaincc, log_softmax

from keyquery.learn.discovery.independence import TINY, TOLERANCE, IndependenceTest, Query
from keyquery.learn.discovery.pag import members
from keyquery.learn.discovery.variables import Variables

ROWS_PER_FREEDOM = 5  # below which a test says nothing
STRATA_KEPT, REGRESSIONS_KEPT, KERNELS_KEPT = 4096, 512, 48  # in caches
NEWTON_STEPS, LOGISTIC_RIDGE = 50, 1e-9  # the ridge bounds coefficients of separable classes
KERNEL_RIDGE = 1e-3  # of the kernel regression on Z
# Widths of the Gaussian kernels of standardised variables by number of rows, as published: marginal, and given Z.
WIDTHS = ((200, 0.8, 1.2), (1200, 0.5, 0.7), (np.inf, 0.3, 0.4))
FAR_APART = 1e6  # squared distance of two categories


class ColumnTest(IndependenceTest):
    """The statistic is −ln p; if Z determines x or y, or leaves too few rows, p is 0, and the pair stays adjacent."""

    def __init__(self, variables: Variables, alpha: float) -> None:
        super().__init__(len(variables.names), -math.log(alpha))
        self.variables = variables

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


def _by_both(p: Callable[[int, int, int], float], query: Query) -> float:
    """The p-value of two tests of a pair, with each of the two as the response."""
    first, second = p(query.x, query.y, query.given), p(query.y, query.x, query.given)
    return min(2 * min(first, second), max(first, second))


class Contingency(ColumnTest):
    """G² = 2 Σ N ln(N/E) or χ² = Σ (N−E)²/E over the strata of Z, with E = N_xz N_yz / N_z."""

    def __init__(self, variables: Variables, alpha: float, pearson: bool = False) -> None:
        super().__init__(variables, alpha)
        self.pearson = pearson
        self.codes = [variables.codes(column) for column in range(self.count)]
        self.strata = lru_cache(STRATA_KEPT)(self._strata)

    def _strata(self, given: int) -> tuple[Int[ndarray, " n"], int]:
        """The stratum of each row, and their number."""
        stratum, count = np.zeros(len(self.variables), dtype=np.int64), 1
        for column in members(given):
            stratum = stratum * self.variables.sizes[column] + self.codes[column]
            count *= self.variables.sizes[column]
            if count > len(stratum):  # most of them are empty
                occurring, stratum = np.unique(stratum, return_inverse=True)
                count = len(occurring)
        return stratum, count

    def counts(self, query: Query) -> Float[ndarray, "z x y"]:
        """The table of each stratum."""
        wide, tall = self.variables.sizes[query.x], self.variables.sizes[query.y]
        stratum, count = self.strata(query.given)
        cell = (stratum * wide + self.codes[query.x]) * tall + self.codes[query.y]
        return np.bincount(cell, minlength=count * wide * tall).reshape(count, wide, tall).astype(np.float64)

    def probability(self, query: Query) -> float:
        """The p-value; 0 where there are fewer than five rows per degree of freedom."""
        table, rows = self.counts(query), len(self.variables)
        of_x, of_y = table.sum(2), table.sum(1)
        some_x, some_y = of_x > 0, of_y > 0
        if some_x.any(0).sum() < 2 or some_y.any(0).sum() < 2:
            return 1.0  # a constant is independent of everything
        # Of the categories that occur in a stratum.
        freedom = float(np.maximum(some_x.sum(1) - 1, 0) @ np.maximum(some_y.sum(1) - 1, 0))
        if freedom == 0 or rows < ROWS_PER_FREEDOM * freedom:
            return 0.0
        expected = (of_x / np.maximum(of_x.sum(1), 1.0)[:, None])[:, :, None] * of_y[:, None, :]
        ratio = table / np.maximum(expected, TINY)  # 0 where nothing is expected
        if self.pearson:  # Σ (N−E)²/E = Σ N²/E − n
            return float(chdtrc(freedom, max(float(np.vdot(table, ratio)) - rows, 0.0)))
        return float(chdtrc(freedom, max(2 * float(np.vdot(table, np.log(np.maximum(ratio, TINY)))), 0.0)))


class Regression(ColumnTest):
    """Does y improve the regression of x on Z? By likelihood ratios, without interactions (Tsagris et al., 2018)."""

    def __init__(self, variables: Variables, alpha: float) -> None:
        super().__init__(variables, alpha)
        self.blocks = [self._block(column) for column in range(self.count)]
        self.basis = lru_cache(REGRESSIONS_KEPT)(self._basis)
        self.fit = lru_cache(REGRESSIONS_KEPT)(self._fit)

    def _block(self, column: int) -> Float[ndarray, "n k"]:
        """A number, standardised, or indicators of all categories but the first; centred."""
        size, values = self.variables.sizes[column], self.variables.values[:, column]
        block = values[:, None] if not size else (values[:, None] == np.arange(1, size)).astype(np.float64)
        block = block - block.mean(0)
        return block / np.maximum(block.std(0), TINY)

    def _basis(self, given: int) -> Float[ndarray, "n k"]:
        """An orthonormal basis of the regressors in Z and the constant."""
        blocks = [np.ones((len(self.variables), 1)), *(self.blocks[z] for z in members(given))]
        return _orthonormal(np.concatenate(blocks, 1))

    def probability(self, query: Query) -> float:
        """The p-value; 0 where Z determines x or y."""
        x, y, given = query
        if self.variables.sizes[x] and self.variables.sizes[y]:
            return _by_both(self._logistic, query)
        return self._linear(y, x, given) if self.variables.sizes[x] else self._linear(x, y, given)

    def _linear(self, response: int, other: int, given: int) -> float:
        basis = self.basis(given)
        target, block = (part - basis @ (basis.T @ part) for part in (self.blocks[response][:, 0], self.blocks[other]))
        rows, left = len(target), _orthonormal(block)
        before, freedom = float(target @ target), left.shape[1]
        effective = rows - basis.shape[1] - (freedom + 2) / 2  # Bartlett
        if before / rows <= TOLERANCE or freedom == 0 or effective <= 0:
            return 1.0 if given == 0 else 0.0  # a constant is independent of everything
        after = before - float(np.square(left.T @ target).sum())
        if after <= TOLERANCE * before:
            return 0.0
        return float(chdtrc(freedom, max(effective * np.log(before / after), 0.0)))

    def _logistic(self, response: int, other: int, given: int) -> float:
        (before, few), (after, many) = self.fit(response, given), self.fit(response, given | 1 << other)
        freedom = (many - few) * (self.variables.sizes[response] - 1)
        if freedom == 0 or freedom * ROWS_PER_FREEDOM > len(self.variables):
            return 1.0 if given == 0 and freedom == 0 else 0.0
        return float(chdtrc(freedom, 2 * max(after - before, 0.0)))

    def _fit(self, response: int, given: int) -> tuple[float, int]:
        """The log-likelihood of a multinomial logistic regression, and the number of its regressors."""
        regressors = self.basis(given) * np.sqrt(len(self.variables))
        value = likelihood(self.variables.codes(response), self.variables.sizes[response], regressors)
        return value, regressors.shape[1]


def _orthonormal(block: Float[ndarray, "n k"]) -> Float[ndarray, "n rank"]:
    left, sizes, _ = np.linalg.svd(block / np.sqrt(len(block)), full_matrices=False)
    return left[:, sizes > np.sqrt(TOLERANCE)]


def likelihood(codes: ndarray, size: int, regressors: Float[ndarray, "n k"]) -> float:
    """The greatest log-likelihood of classes by multinomial logistic regression, by Newton's method."""
    rows, width = regressors.shape
    target = (codes[:, None] == np.arange(1, size)).astype(np.float64)
    weights, value = np.zeros((size - 1, width)), -np.inf
    for _ in range(NEWTON_STEPS):
        log_p = log_softmax(np.concatenate([np.zeros((rows, 1)), regressors @ weights.T], 1), axis=1)
        last, value = value, float(log_p[np.arange(rows), codes].sum())
        if value - last < 1e-8:
            return max(value, last)
        p = np.exp(log_p[:, 1:])
        slope = (target - p).T @ regressors - LOGISTIC_RIDGE * rows * weights
        spread = np.einsum("ni,ij->nij", p, np.eye(size - 1)) - p[:, :, None] * p[:, None, :]
        curvature = np.einsum("nij,na,nb->iajb", spread, regressors, regressors, optimize=True)
        curvature = curvature.reshape(slope.size, slope.size) + LOGISTIC_RIDGE * rows * np.eye(slope.size)
        step = np.linalg.solve(curvature, slope.ravel()).reshape(weights.shape)
        weights = weights + step * min(1.0, 10 / max(np.abs(step).max(), 1e-12))  # no leap where classes are separable
    return value


class KernelTest(ColumnTest):
    """T = tr(K_x K_y) of centred kernels (KCI; Zhang, Peters, Janzing and Schölkopf, 2011).

    Given Z, of R K_(x,z) R and R K_y R with R = ε(K_z + εI)⁻¹. Under independence T is a weighted sum of χ² variables,
    taken as a gamma one of its mean and variance. Since only x is joined by z, both orders are tested.
    """

    def __init__(self, variables: Variables, alpha: float) -> None:
        super().__init__(variables, alpha)
        values = variables.values
        self.scaled = (values - values.mean(0)) / np.maximum(values.std(0), TINY)
        self.width, self.conditional = next(row[1:] for row in WIDTHS if len(values) < row[0])
        self.distance = lru_cache(KERNELS_KEPT)(self._distance)
        self.regression = lru_cache(KERNELS_KEPT)(self._regression)
        self.residual = lru_cache(KERNELS_KEPT)(self._residual)

    def _kernel(self, nodes: tuple[int, ...], width: float) -> Float[ndarray, "n n"]:
        """The product of the kernels of some variables: exp(−½ Σ d²/width²), where other categories are far apart."""
        total = self.distance(nodes[0])
        for node in nodes[1:]:
            total = total + self.distance(node)
        return np.exp(total * (-0.5 / width**2))

    def _distance(self, node: int) -> Float[ndarray, "n n"]:
        """Squared distances of the rows in one variable."""
        apart = np.subtract.outer(self.scaled[:, node], self.scaled[:, node])
        return np.where(apart == 0, 0.0, FAR_APART) if self.variables.sizes[node] else np.square(apart, out=apart)

    def _regression(self, given: int) -> Float[ndarray, "n n"]:
        nodes = members(given)
        kernel = _centred(self._kernel(nodes, self.conditional * np.sqrt(len(nodes))))
        kernel[np.diag_indices_from(kernel)] += KERNEL_RIDGE
        lower = torch.linalg.cholesky(torch.from_numpy(kernel))  # half of the work of a general inverse
        return KERNEL_RIDGE * torch.cholesky_inverse(lower).numpy()

    def _residual(self, node: int, given: int, joined: bool) -> Float[ndarray, "n n"]:
        """The centred kernel of a variable, of what Z leaves of it; with `joined`, of the variable and Z."""
        others = members(given)
        if not others:
            return _centred(self._kernel((node,), self.width))
        width = self.conditional * np.sqrt(len(others))
        kernel = self._kernel((node,), width)
        if joined:
            kernel = kernel * self._kernel(others, 2 * width)  # z enters at half its scale, as published
        regression = self.regression(given)
        return regression @ _centred(kernel) @ regression

    def probability(self, query: Query) -> float:
        """The p-value."""
        if query.given:
            return _by_both(self._given, query)
        rows, first, second = len(self.variables), *(self.residual(node, 0, False) for node in query[:2])
        mean = np.trace(first) * np.trace(second) / rows
        variance = 2 * np.square(first).sum() * np.square(second).sum() / rows**2
        return _tail(float(np.vdot(first, second)), mean, variance)

    def decisive(self, query: Query) -> float:
        """The p-value, or 2p₁ ≥ p where that alone is below alpha: dependence needs one order only."""
        if query.given and (bound := 2 * self._given(*query)) < math.exp(-self.threshold):
            return bound
        return self.probability(query)

    def _given(self, x: int, y: int, given: int) -> float:
        product = self.residual(x, given, True) * self.residual(y, given, False)
        return _tail(float(product.sum()), float(np.trace(product)), 2 * float(np.square(product).sum()))


def _centred(kernel: Float[ndarray, "n n"]) -> Float[ndarray, "n n"]:
    rows = kernel - kernel.mean(0)
    return rows - rows.mean(1, keepdims=True)


def _tail(statistic: float, mean: float, variance: float) -> float:
    """The probability that a gamma variable of this mean and variance exceeds the statistic."""
    if mean <= 0 or variance <= 0:
        return 1.0
    return float(gammaincc(mean**2 / variance, max(statistic * mean / variance, 0.0)))
