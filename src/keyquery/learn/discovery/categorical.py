"""Tests of independence between categories: G² and Pearson's χ²."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.special import chdtrc

from keyquery.learn.discovery.independence import ProbabilityTest, Query
from keyquery.learn.discovery.pag import members
from keyquery.learn.discovery.variables import Variables

ROWS = 5  # per degree of freedom, below which a test says nothing
KEPT = 4096  # strata that are cached
TINY = float(np.finfo(float).tiny)


class Contingency(ProbabilityTest):
    """G² = 2 Σ N ln(N/E) or χ² = Σ (N−E)²/E over the strata of Z, with E = N_xz N_yz / N_z.

    Degrees of freedom are Σ_z (r_z − 1)(c_z − 1) over categories that occur in a stratum.
    """

    def __init__(self, variables: Variables, alpha: float, pearson: bool = False) -> None:
        super().__init__(len(variables.names), alpha)
        self.variables = variables
        self.pearson = pearson
        self.codes = [variables.codes(column) for column in range(self.count)]
        self.strata = lru_cache(KEPT)(self._strata)

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
        """The contingency table of each stratum."""
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
        freedom = float(np.maximum(some_x.sum(1) - 1, 0) @ np.maximum(some_y.sum(1) - 1, 0))
        if freedom == 0 or rows < ROWS * freedom:
            return 0.0
        expected = (of_x / np.maximum(of_x.sum(1), 1.0)[:, None])[:, :, None] * of_y[:, None, :]
        ratio = table / np.maximum(expected, TINY)  # 0 where nothing is expected
        if self.pearson:  # Σ (N−E)²/E = Σ N²/E − n
            return float(chdtrc(freedom, max(float(np.vdot(table, ratio)) - rows, 0.0)))
        return float(chdtrc(freedom, max(2 * float(np.vdot(table, np.log(np.maximum(ratio, TINY)))), 0.0)))
