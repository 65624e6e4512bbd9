"""A kernel test of independence, of nonlinear dependence too (KCI; Zhang, Peters, Janzing and Schölkopf, 2011)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.special import gammaincc

from keyquery.learn.discovery.independence import ProbabilityTest, Query
from keyquery.learn.discovery.pag import members
from keyquery.learn.discovery.variables import Variables

RIDGE = 1e-3  # of the kernel regression on Z
# Widths of the Gaussian kernels of standardised variables by number of rows, as published: marginal, and given Z.
WIDTHS = ((200, 0.8, 1.2), (1200, 0.5, 0.7), (np.inf, 0.3, 0.4))
FAR = 1e6  # squared distance of two categories
KEPT = 48  # matrices (n, n) that are cached


class KernelTest(ProbabilityTest):
    """T = tr(K_x K_y) of centred kernels, after kernel ridge regression on Z; null by a gamma distribution.

    With R = ε(K_z + εI)⁻¹, K_x|z = R K_(x,z) R and K_y|z = R K_y R. Under independence T is a weighted sum of χ²
    variables of mean tr(K_x|z ∘ K_y|z) and variance 2‖K_x|z ∘ K_y|z‖²; without Z, of mean tr K_x tr K_y / n and
    variance 2‖K_x‖²‖K_y‖²/n². Categories have the kernel 1[a = b]. Since only x is joined by z,
    both orders are tested, and p = min(2 min(p₁, p₂), max(p₁, p₂)).
    """

    def __init__(self, variables: Variables, alpha: float) -> None:
        super().__init__(len(variables.names), alpha)
        self.variables = variables
        values = variables.values
        self.scaled = (values - values.mean(0)) / np.maximum(values.std(0), np.finfo(float).tiny)
        self.width, self.conditional = next(row[1:] for row in WIDTHS if len(values) < row[0])
        self.regression, self.residual = lru_cache(KEPT)(self._regression), lru_cache(KEPT)(self._residual)
        self.distance = lru_cache(KEPT)(self._distance)

    def _kernel(self, nodes: tuple[int, ...], width: float) -> Float[ndarray, "n n"]:
        """The product of the kernels of some variables: exp(−½ Σ d²/width²), where other categories are far apart."""
        total = self.distance(nodes[0])
        for node in nodes[1:]:
            total = total + self.distance(node)
        return np.exp(total * (-0.5 / width**2))

    def _distance(self, node: int) -> Float[ndarray, "n n"]:
        """Squared distances of the rows in one variable."""
        apart = np.subtract.outer(self.scaled[:, node], self.scaled[:, node])
        return np.where(apart == 0, 0.0, FAR) if self.variables.sizes[node] else np.square(apart, out=apart)

    def _regression(self, given: int) -> Float[ndarray, "n n"]:
        nodes = members(given)
        kernel = _centred(self._kernel(nodes, self.conditional * np.sqrt(len(nodes))))
        kernel[np.diag_indices_from(kernel)] += RIDGE
        lower = torch.linalg.cholesky(torch.from_numpy(kernel))  # half of the work of a general inverse
        return RIDGE * torch.cholesky_inverse(lower).numpy()

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
        x, y, given = query
        rows = len(self.variables)
        if not given:
            first, second = self.residual(x, 0, False), self.residual(y, 0, False)
            mean = np.trace(first) * np.trace(second) / rows
            variance = 2 * np.square(first).sum() * np.square(second).sum() / rows**2
            return _tail(float(np.vdot(first, second)), mean, variance)
        both = [self._given(*pair, given) for pair in ((x, y), (y, x))]
        return min(2 * min(both), max(both))

    def decisive(self, query: Query) -> float:
        """The p-value, or 2p₁ ≥ p where that alone is below alpha: dependence needs one order only."""
        x, y, given = query
        if given and (bound := 2 * self._given(x, y, given)) < math.exp(-self.threshold):
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
