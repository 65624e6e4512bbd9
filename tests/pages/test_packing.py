"""Packed numbers are those of three digits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keyquery.pages.packing import pack
from tests.pages.readings import unpacked


@given(st.lists(st.floats(-1e15, 1e15, allow_nan=False).filter(lambda v: v == 0 or abs(v) > 1e-15), max_size=20))
def test_packed_numbers_are_those_of_three_digits(values):
    for value, given_back in zip(values, unpacked(pack(values)), strict=True):
        # A value halfway between two such numbers may go to either.
        near = {float(f"{value * (1 + e):.2e}") for e in (0, 1e-12, -1e-12)}
        assert given_back in near
    assert unpacked(pack([1.0, np.nan, 0.0, -2.5])) == [1.0, None, 0.0, -2.5]
