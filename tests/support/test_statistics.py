"""Intervals against printed tables, arithmetic by hand, and their own promise."""

import pytest
import torch
from scipy import stats

from keyquery.support.statistics import Interval, paired, student, student_tail, together

# From any printed table of Student's t, two-sided.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 15: 2.131, 30: 2.042, 120: 1.980}
TABLE_99 = {1: 63.657, 2: 9.925, 5: 4.032, 10: 3.169, 30: 2.750}


@pytest.mark.parametrize(("freedom", "value"), TABLE.items())
def test_student_is_that_of_the_tables(freedom, value):
    assert student(freedom) == pytest.approx(value, rel=2e-3)


@pytest.mark.parametrize(("freedom", "value"), TABLE_99.items())
def test_other_levels_too(freedom, value):
    assert student(freedom, 0.99) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("freedom", [2, 4, 10, 30])
@pytest.mark.parametrize("t", [-40.0, -2.0, 0.0, 0.3, 1.5, 5.0, 40.0, 1e4])
def test_tail_is_that_of_scipy(t, freedom):
    assert student_tail(t, freedom) == pytest.approx(stats.t.sf(t, freedom), rel=1e-9)


def test_tail_needs_an_even_number_of_degrees_of_freedom():
    with pytest.raises(ValueError, match="even and positive, got 5"):
        student_tail(1.0, 5)


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
