"""Rotary positions: M(Δ) against the scores of rotated queries and keys, one position at a time."""

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.testing import check_form
from tests.forms.strategies import assert_near, pairs


def rotate_by_hand(vector, position, dims, base, interleaved, factor):
    """Each pair as a complex number, turned by position·base^(−2i/dims)."""
    out = list(vector)
    for i in range(dims // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dims // 2)
        turned = complex(vector[a], vector[b]) * cmath.exp(1j * position * base ** (-2 * i / dims)) * factor
        out[a], out[b] = turned.real, turned.imag
    return out


@given(
    dims=st.sampled_from([2, 4, 6]),
    interleaved=st.booleans(),
    factor=st.sampled_from([1.0, 1.3]),
    base=st.sampled_from([10000.0, 50.0]),
    positions=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_scores_at_an_offset_are_those_of_the_rotated_model(dims, interleaved, factor, base, positions):
    query, key = torch.randn(2, 6, 9, dtype=torch.float64)
    x, y = torch.randn(2, 9, dtype=torch.float64)
    at_query, at_key = positions
    q = rotate_by_hand((query @ x).tolist(), at_query, dims, base, interleaved, factor)
    k = rotate_by_hand((key @ y).tolist(), at_key, dims, base, interleaved, factor)
    rope = kq.Rope(dims, base=base, interleaved=interleaved, factor=factor)
    score = float(kq.Form(query, key).at(at_key - at_query, rope).scores(x, y))
    assert score == pytest.approx(math.fsum(a * b for a, b in zip(q, k, strict=True)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(data=st.data(), offset=st.integers(-40, 40))
def test_at_turns_any_factors(dtype, data, offset):
    query, key = data.draw(pairs(dtype=dtype))
    if query.shape[-2] < 2:
        return
    angle = offset * torch.ones(1, dtype=torch.float64)
    turn = torch.eye(query.shape[-2], dtype=torch.float64)
    turn[:2, :2] = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
    form = kq.Form(query, key).at(offset, kq.Rope(2))
    expected = query.double().mT @ turn @ key.double()
    assert_near(form.dense(), expected, query.double().norm() * key.double().norm(), dtype)
    check_form(form)


def test_offset_zero_changes_nothing():
    form = kq.Form(*torch.randn(2, 3, 4, 9))
    torch.testing.assert_close(form.at(0, kq.Rope(4)).dense(), form.dense())


def test_given_frequencies_are_used():
    rope = kq.Rope(4, frequencies=torch.tensor([1.0, 0.25]))
    torch.testing.assert_close(rope.angles(2.0), torch.tensor([2.0, 0.5], dtype=torch.float64))


def test_a_tensor_of_positions_turns_each_token_by_its_own():
    rope, x = kq.Rope(4), torch.randn(5, 4)
    together = rope.rotate(x, torch.arange(5.0))
    for position in range(5):
        torch.testing.assert_close(together[position], rope.rotate(x[position], position))


def test_transpose_of_an_offset_is_the_opposite_offset_of_the_transpose():
    form, rope = kq.Form(*torch.randn(2, 6, 9, dtype=torch.float64)), kq.Rope(6)
    torch.testing.assert_close(form.at(3, rope).mT.dense(), form.mT.at(-3, rope).dense())
