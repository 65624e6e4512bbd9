"""What tests of independence by a probability have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable

from keyquery.learn.discovery import Query
from keyquery.learn.discovery.variables import Variables


class ProbabilityTest(ABC):
    """A test of conditional independence by its p-value: the statistic is −ln p, the threshold −ln alpha.

    A test that says nothing, since the conditioning set determines x or y or leaves too few rows, has the p-value 0:
    the pair stays adjacent.
    """

    def __init__(self, variables: Variables, alpha: float) -> None:
        self.variables = variables
        self.count, self.threshold = len(variables.names), -math.log(alpha)
        self.most = max(0, self.count - 2)
        self.tests, self.by_size = 0, Counter[int]()
        self._known: dict[Query, float] = {}

    def prepare(self, queries: Iterable[Query]) -> None:  # noqa: B027  # may be overridden
        """Nothing: each test is computed when it is asked for, since many are not."""

    def statistic(self, query: Query) -> float:
        """−ln p of one test; where x and y are dependent, at most that."""
        if query not in self._known:
            self.tests += 1
            self.by_size[query.given.bit_count()] += 1
            p = self.decisive(query)
            self._known[query] = -math.log(p) if p > 0 else math.inf
        return self._known[query]

    def decisive(self, query: Query) -> float:
        """The p-value, or where it is below alpha, a bound of it that is below alpha too."""
        return self.probability(query)

    @abstractmethod
    def probability(self, query: Query) -> float:
        """The p-value of one test."""
