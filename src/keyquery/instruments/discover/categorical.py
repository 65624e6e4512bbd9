"""Tests of independence between categories: G² and Pearson's χ²."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from keyquery.instruments.causes.discovery import Query, members
from keyquery.instruments.discover.probability import ProbabilityTest, chi2_tail
from keyquery.instruments.discover.variables import Variables

ROWS = 5  # per degree of freedom, below which a test says nothing
KEPT = 4096  # strata that are cached


class Contingency(ProbabilityTest):
    """G² = 2 Σ N ln(N/E) or χ² = Σ (N−E)²/E over the strata of Z, with E = N_xz N_yz / N_z.

    Degrees of freedom are Σ_z (r_z − 1)(c_z − 1) over categories that occur in a stratum.

    >>> test = Contingency(Variables(["a", "b"], np.repeat(np.eye(2), 50, 0), [2, 2]), 0.05)
    >>> test.statistic(Query(0, 1, 0)) > test.threshold
    True
    """

    def __init__(self, variables: Variables, alpha: float, pearson: bool = False) -> None:
        super().__init__(variables, alpha)
        self.pearson = pearson
        self.codes = [variables.codes(column) for column in range(self.count)]
        self.strata = lru_cache(KEPT)(self._strata)

    def _strata(self, given: int) -> tuple[Int[ndarray, " n"], int]:
        """The stratum of each row, and their number."""
        stratum, count = np.zeros(len(self.variables), dtype=np.int64), 1
        for column in members(given):
            joint = stratum * self.variables.sizes[column] + self.codes[column]
            occurring, stratum = np.unique(joint, return_inverse=True)
            count = len(occurring)
        return stratum, count

    def counts(self, query: Query) -> Float[ndarray, "z x y"]:
        """The contingency table of each stratum."""
        stratum, count = self.strata(query.given)
        wide, tall = self.variables.sizes[query.x], self.variables.sizes[query.y]
        place = (stratum * wide + self.codes[query.x]) * tall + self.codes[query.y]
        return np.bincount(place, minlength=count * wide * tall).reshape(count, wide, tall).astype(np.float64)

    def probability(self, query: Query) -> float:
        """The p-value; 0 where there are fewer than five rows per degree of freedom."""
        table = self.counts(query)
        of_x, of_y = table.sum(2), table.sum(1)
        if min((of_x.sum(0) > 0).sum(), (of_y.sum(0) > 0).sum()) < 2:
            return 1.0  # a constant is independent of everything
        freedom = float(((of_x > 0).sum(1) - 1) @ ((of_y > 0).sum(1) - 1))
        if freedom == 0 or len(self.variables) < ROWS * freedom:
            return 0.0
        expected = of_x[:, :, None] * of_y[:, None, :] / of_x.sum(1)[:, None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = (table - expected) ** 2 / expected if self.pearson else 2 * table * np.log(table / expected)
        return chi2_tail(float(np.nansum(terms)), freedom)
