"""Tests of independence between categories: G² and Pearson's χ²."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.special import chdtrc

from keyquery.learn.discovery import ProbabilityTest, Query, members
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
        self.strata, self.pairs = lru_cache(KEPT)(self._strata), lru_cache(KEPT)(self._pairs)
        self.blocks = lru_cache(KEPT)(self._blocks)

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

    def _blocks(self, given: int, cells: int) -> tuple[Int[ndarray, " n"], int]:
        """The first cell of the stratum of each row, and the number of strata."""
        stratum, count = self.strata(given)
        return stratum * cells, count

    def _pairs(self, x: int, y: int) -> Int[ndarray, " n"]:
        """The pair of categories of each row."""
        return self.codes[x] * self.variables.sizes[y] + self.codes[y]

    def counts(self, query: Query) -> Float[ndarray, "z x y"]:
        """The contingency table of each stratum."""
        wide, tall = self.variables.sizes[query.x], self.variables.sizes[query.y]
        place, count = self.pairs(query.x, query.y), 1
        if query.given:
            block, count = self.blocks(query.given, wide * tall)
            place = block + place
        return np.bincount(place, minlength=count * wide * tall).reshape(count, wide, tall).astype(np.float64)

    def probability(self, query: Query) -> float:
        """The p-value; 0 where there are fewer than five rows per degree of freedom."""
        table = self.counts(query)
        total = np.add.reduce
        of_x, of_y = total(table, 2), total(table, 1)
        occurring = np.count_nonzero
        if full := occurring(of_x) == of_x.size and occurring(of_y) == of_y.size:  # the usual case
            freedom = float(len(table) * (table.shape[1] - 1) * (table.shape[2] - 1))
            if table.shape[1] < 2 or table.shape[2] < 2:
                return 1.0
        else:
            some_x, some_y = of_x > 0, of_y > 0
            if some_x.any(0).sum() < 2 or some_y.any(0).sum() < 2:
                return 1.0  # a constant is independent of everything
            freedom = float(np.maximum(total(some_x, 1) - 1, 0) @ np.maximum(total(some_y, 1) - 1, 0))
        rows = len(self.variables)
        if freedom == 0 or rows < ROWS * freedom:
            return 0.0
        of_z = total(of_x, 1)
        expected = (of_x / (of_z if full else np.maximum(of_z, 1.0))[:, None])[:, :, None] * of_y[:, None, :]
        ratio = table / (expected if full else np.maximum(expected, TINY))  # 0 where nothing is expected
        if self.pearson:  # Σ (N−E)²/E = Σ N²/E − n
            return float(chdtrc(freedom, max(float(np.vdot(table, ratio)) - rows, 0.0)))
        return float(chdtrc(freedom, max(2 * float(np.vdot(table, np.log(np.maximum(ratio, TINY)))), 0.0)))
