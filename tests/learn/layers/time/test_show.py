"""The picture of a time kernel: periods that are known are dashed, at their multiples and as themselves."""

import pytest
import torch

import keyquery as kq
from keyquery import pages

pytest.importorskip("matplotlib")


def test_known_periods_are_dashed(tmp_path):
    reading = kq.MercerTime(8, degree=2, periods=2).time_kernel(torch.linspace(1, 10, 4, dtype=torch.float64))
    left, right = reading.plot(periods=[3, 4]).axes

    def dashed(axis):
        return sorted(line.get_xdata()[0] for line in axis.get_lines() if line.is_dashed())

    assert (dashed(left), dashed(right)) == ([3, 4, 6, 8, 9], [3, 4])
    assert dashed(reading.plot().axes[0]) == []
    plain, marked = (pages.picture_bytes(tmp_path / "a.svg", reading, **options) for options in ({}, {"periods": [3]}))
    assert plain != marked
    with pytest.raises(ValueError, match="periods must be above 0, got \\[3, 0\\]"):
        reading.plot(periods=[3, 0])
