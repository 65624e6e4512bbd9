"""A test of independence between numbers and categories: likelihood ratios of nested regressions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import chdtrc

from keyquery.learn.discovery.independence import TOLERANCE, ProbabilityTest, Query
from keyquery.learn.discovery.pag import members
from keyquery.learn.discovery.variables import Variables

KEPT = 512  # regressions that are cached
STEPS, RIDGE = 50, 1e-9  # of Newton's method; the ridge bounds coefficients of separable classes


class Regression(ProbabilityTest):
    """Does y improve the regression of x on Z, by the likelihood ratio?

    A number is regressed linearly, with Bartlett's correction of the ratio; if both are categories, each is regressed
    on the other by a multinomial logistic regression, and p = min(2 min(p₁, p₂), max(p₁, p₂)) (Tsagris et al., 2018).
    A category enters as indicators, so that effects are linear and without interactions.
    """

    def __init__(self, variables: Variables, alpha: float) -> None:
        super().__init__(len(variables.names), alpha)
        self.variables = variables
        self.blocks = [self._block(column) for column in range(self.count)]
        self.basis = lru_cache(KEPT)(self._basis)
        self.fit = lru_cache(KEPT)(self._fit)

    def _block(self, column: int) -> Float[ndarray, "n k"]:
        """A number, standardised, or indicators of all categories but the first; centred."""
        size, values = self.variables.sizes[column], self.variables.values[:, column]
        block = values[:, None] if not size else (values[:, None] == np.arange(1, size)).astype(np.float64)
        block = block - block.mean(0)
        return block / np.maximum(block.std(0), np.finfo(float).tiny)

    def _basis(self, given: int) -> Float[ndarray, "n k"]:
        """An orthonormal basis of the regressors in Z and the constant."""
        rows = len(self.variables)
        blocks = [np.ones((rows, 1)), *(self.blocks[z] for z in members(given))]
        left, sizes, _ = np.linalg.svd(np.concatenate(blocks, 1) / np.sqrt(rows), full_matrices=False)
        return left[:, sizes > np.sqrt(TOLERANCE)]

    def probability(self, query: Query) -> float:
        """The p-value; 0 where Z determines x or y."""
        x, y, given = query
        numeric = [not self.variables.sizes[node] for node in (x, y)]
        if any(numeric):
            return self._linear(x, y, given) if numeric[0] else self._linear(y, x, given)
        first, second = self._logistic(x, y, given), self._logistic(y, x, given)
        return min(2 * min(first, second), max(first, second))

    def _linear(self, response: int, other: int, given: int) -> float:
        basis = self.basis(given)
        target, block = (part - basis @ (basis.T @ part) for part in (self.blocks[response][:, 0], self.blocks[other]))
        rows = len(target)
        left, sizes, _ = np.linalg.svd(block / np.sqrt(rows), full_matrices=False)
        left = left[:, sizes > np.sqrt(TOLERANCE)]
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
        if freedom == 0 or freedom * 5 > len(self.variables):
            return 1.0 if given == 0 and freedom == 0 else 0.0
        return float(chdtrc(freedom, 2 * max(after - before, 0.0)))

    def _fit(self, response: int, given: int) -> tuple[float, int]:
        """The log-likelihood of a multinomial logistic regression, and the number of its regressors."""
        regressors = self.basis(given) * np.sqrt(len(self.variables))
        value = likelihood(self.variables.codes(response), self.variables.sizes[response], regressors)
        return value, regressors.shape[1]


def likelihood(codes: ndarray, size: int, regressors: Float[ndarray, "n k"]) -> float:
    """The greatest log-likelihood of classes by multinomial logistic regression, by Newton's method."""
    rows, width = regressors.shape
    target = (codes[:, None] == np.arange(1, size)).astype(np.float64)
    weights, value = np.zeros((size - 1, width)), -np.inf
    for _ in range(STEPS):
        scores = np.concatenate([np.zeros((rows, 1)), regressors @ weights.T], 1)
        top = scores.max(1, keepdims=True)
        log_p = scores - top - np.log(np.exp(scores - top).sum(1, keepdims=True))
        last, value = value, float(log_p[np.arange(rows), codes].sum())
        if value - last < 1e-8:
            return max(value, last)
        p = np.exp(log_p[:, 1:])
        slope = (target - p).T @ regressors - RIDGE * rows * weights
        spread = np.einsum("ni,ij->nij", p, np.eye(size - 1)) - p[:, :, None] * p[:, None, :]
        curvature = np.einsum("nij,na,nb->iajb", spread, regressors, regressors, optimize=True)
        curvature = curvature.reshape(slope.size, slope.size) + RIDGE * rows * np.eye(slope.size)
        step = np.linalg.solve(curvature, slope.ravel()).reshape(weights.shape)
        weights = weights + step * min(1.0, 10 / max(np.abs(step).max(), 1e-12))  # no leap where classes are separable
    return value
