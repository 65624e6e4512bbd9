"""Intervals against printed tables, arithmetic by hand, and their own promise."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyquery.support.statistics import Interval, paired, spearman, student, student_tail, together

# From any printed table of Student's t, two-sided.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 15: 2.131, 30: 2.042, 120: 1.980}
TABLE_99 = {1: 63.657, 2: 9.925, 5: 4.032, 10: 3.169, 30: 2.750}


@pytest.mark.parametrize(("freedom", "value"), TABLE.items())
def test_student_is_that_of_the_tables(freedom, value):
    assert student(freedom) == pytest.approx(value, abs=5.1e-4)


@pytest.mark.parametrize(("freedom", "value"), TABLE_99.items())
def test_other_levels_too(freedom, value):
    assert student(freedom, 0.99) == pytest.approx(value, abs=5.1e-4)


# By hand: Cauchy's and Student's own distribution functions, for 1 and 2 degrees of freedom.
TAILS = {1: lambda t: 0.5 - math.atan(t) / math.pi, 2: lambda t: 0.5 - t / (2 * math.sqrt(2 + t * t))}


@pytest.mark.parametrize("freedom", [1, 2])
@pytest.mark.parametrize("t", [-40.0, -2.0, 0.0, 0.3, 1.5, 5.0, 40.0])
def test_tails_by_hand(t, freedom):
    assert student_tail(t, freedom) == pytest.approx(TAILS[freedom](t), rel=1e-9)


@pytest.mark.parametrize("t", ["40", "1e4", "1e9"])
def test_a_far_tail_loses_no_digits(t):
    with localcontext(prec=100):  # the distribution function for 4 degrees of freedom, in 100 digits
        x = 4 / (4 + Decimal(t) ** 2)
        expected = float((1 - (1 - x).sqrt() * (1 + x / 2)) / 2)
    assert student_tail(float(t), 4) == pytest.approx(expected, rel=1e-9, abs=0)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=3, max_size=12))
def test_rank_correlation_by_counting(pairs):
    """Ranks by counting what is smaller, and half of what is equal."""
    values = np.array(pairs).T
    ranks = [[sum(b < a for b in row) + sum(b == a for b in row) / 2 for a in row] for row in values]
    if any(len(set(row)) == 1 for row in values):
        assert spearman(*values) is None
    else:
        assert spearman(*values) == pytest.approx(np.corrcoef(ranks)[0, 1], abs=1e-12)


def test_an_interval_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, so the half-width is 4.303/√3.
    found = paired(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert found.change == 2
    assert found.high - found.change == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert found.change - found.low == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_pairs_take_out_what_they_share():
    level = 100 * torch.arange(8.0)
    assert paired(level, level + 1) == Interval(1.0, 1.0, 1.0)


def test_one_pair_is_no_measurement():
    with pytest.raises(ValueError, match="at least 2 pairs, got 1"):
        paired(torch.zeros(1), torch.zeros(1))


def test_95_of_100_intervals_hold_the_truth():
    draws = torch.randn(4000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    held = [low <= 0 <= high for _, low, high in (paired(torch.zeros(6), row) for row in draws)]
    assert sum(held) / len(held) == pytest.approx(0.95, abs=0.015)  # four standard errors


def test_the_mean_of_intervals_by_hand():
    assert together([Interval(0.0, -3.0, 3.0), Interval(2.0, -2.0, 6.0)]) == Interval(1.0, -1.5, 3.5)
