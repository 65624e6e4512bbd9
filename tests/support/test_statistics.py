"""Intervals against printed tables, arithmetic by hand, and their own promise."""

from decimal import Decimal, localcontext

import pytest
import torch

from keyquery.support.statistics import Interval, paired, spearman, student, student_tail, together

# From any printed table of Student's t, two-sided.
TABLE = {(1, 0.95): 12.706, (10, 0.95): 2.228, (120, 0.95): 1.980, (5, 0.99): 4.032}


def test_student_is_that_of_the_tables():
    for (freedom, level), value in TABLE.items():
        assert student(freedom, level) == pytest.approx(value, abs=5.1e-4)


def test_rank_correlation_of_what_is_constant_is_none():
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 20, 300], [3.0, 2.0, 1.0]) == -1


@pytest.mark.parametrize("t", ["0.5", "40", "1e9"])
def test_a_far_tail_loses_no_digits(t):
    with localcontext(prec=100):  # the distribution function for 4 degrees of freedom, in 100 digits
        x = 4 / (4 + Decimal(t) ** 2)
        expected = float((1 - (1 - x).sqrt() * (1 + x / 2)) / 2)
    assert student_tail(float(t), 4) == pytest.approx(expected, rel=1e-9, abs=0)


def test_an_interval_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, so the half-width is 4.303/√3.
    found = paired(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert found.change == 2
    assert found.high - found.change == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert found.change - found.low == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_one_pair_is_no_measurement():
    with pytest.raises(ValueError, match="at least 2 pairs, got 1"):
        paired(torch.zeros(1), torch.zeros(1))


def test_the_mean_of_intervals_by_hand():
    assert together([Interval(0.0, -3.0, 3.0), Interval(2.0, -2.0, 6.0)]) == Interval(1.0, -1.5, 3.5)
