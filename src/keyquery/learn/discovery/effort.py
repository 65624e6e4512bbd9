"""Estimated duration of a search."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from keyquery.learn.discovery.independence import PartialCorrelation
from keyquery.learn.discovery.search import icd

FEW = 12  # nodes of the timed search


def expected_seconds(test: PartialCorrelation) -> float:
    """Estimated seconds to test all adjacent pairs given each single neighbour, from the time of a small search.

    Most tests of a dense graph have this size. Their number is Σ |adj(x) ∪ adj(y)| − 2 over marginally dependent pairs;
    larger sets and orientation are not included. 0 for small graphs.

    Parameters
    ----------
    test
        The test that a search would use.

    Returns
    -------
    float
        Seconds.

    Examples
    --------
    >>> expected_seconds(PartialCorrelation(np.eye(3), 768, 0.01))
    0.0
    """
    if test.count <= FEW:
        return 0.0
    few = PartialCorrelation(test.correlation[:FEW, :FEW], test.samples, 1 - 1e-9)  # hardly anything is independent
    start = perf_counter()
    icd(few, rounds=2)
    return singles(test) * (perf_counter() - start) / max(few.tests, 1)


def singles(test: PartialCorrelation) -> int:
    """Number of tests that condition on a single node."""
    with np.errstate(divide="ignore"):
        strength = np.arctanh(np.minimum(np.abs(test.correlation), 1.0)) * np.sqrt(max(test.samples - 3, 0.0))
    near = (strength >= test.threshold).astype(np.float32)
    np.fill_diagonal(near, 0.0)
    degrees = near.sum(1)
    either = degrees[:, None] + degrees - near @ near - 2
    return int((either * near).sum(dtype=np.float64) / 2)
