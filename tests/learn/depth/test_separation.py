"""Separation ranks: against the polynomials themselves, in exact fractions, and between the bounds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy import QQ, ZZ
from sympy.polys.matrices import DomainMatrix
from sympy.polys.rings import ring

import keyquery as kq
from keyquery.learn.depth.separation import LARGEST, log_rank_of_two, rank_of_two


def rank_by_coefficients(layers, width, heads, tokens):
    """The rank of y₁'s coefficients, monomials of the first half by monomials of the second, in exact fractions."""
    rng, (_, *variables) = np.random.default_rng(1), ring(f"x:{tokens * width}", ZZ)
    x = np.array(variables, dtype=object).reshape(tokens, width)
    for _ in range(layers):
        weights = rng.integers(-999, 1000, (heads, 4, width // heads, width)).astype(object)
        x = sum((x @ q.T) @ (x @ k.T).T @ (x @ v.T) @ o for q, k, v, o in weights)
    half = len(variables) // 2
    terms = {(powers[:half], powers[half:]): QQ(value) for powers, value in x[0, 0].terms()}
    rows, columns = (sorted(set(side)) for side in zip(*terms, strict=True))
    matrix = [[terms.get((row, column), QQ(0)) for column in columns] for row in rows]
    return DomainMatrix(matrix, (len(rows), len(columns)), QQ).rank()


@pytest.mark.parametrize(
    ("layers", "width", "heads", "tokens"),
    [(1, 3, 1, 2), (1, 4, 2, 2), (2, 1, 1, 2), (2, 2, 2, 2), (2, 3, 1, 2), (1, 8, 2, 4), (2, 1, 1, 4), (2, 2, 1, 4)],
)
def test_the_rank_is_that_of_the_polynomial(layers, width, heads, tokens):
    assert kq.separation_rank(layers, width, heads, tokens) == rank_by_coefficients(layers, width, heads, tokens)


@pytest.mark.parametrize(("layers", "width", "heads"), [(1, 2, 1), (1, 4, 2), (2, 3, 1), (2, 4, 2), (3, 2, 1)])
def test_ranks_of_two_tokens_meet_their_bound(layers, width, heads):
    assert kq.separation_rank(layers, width, heads) == rank_of_two(layers, width)


@given(st.integers(1, 6), st.integers(1, 40))
def test_the_logarithm_of_the_bound(layers, width):
    assert log_rank_of_two(layers, width) == pytest.approx(math.log(rank_of_two(layers, width), 3), abs=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 0, "width": 2}, "layers must be at least 1, got 0"),
        ({"layers": 1, "width": 0}, "width must be at least 1, got 0"),
        ({"layers": 1, "width": 4, "heads": 3}, "heads must divide width: 3 does not divide 4"),
        ({"layers": 1, "width": 4, "tokens": 3}, "tokens must be even, to split into halves, got 3"),
        ({"layers": 1, "width": 4, "tokens": 0}, "tokens must be at least 2, got 0"),
        ({"layers": 3, "width": 4}, "the separation rank of 3 layers of width 4 may be above 1,023, the limit"),
        ({"layers": 50, "width": 50}, "may be above"),
        ({"layers": 1, "width": 8000}, f"may be above {LARGEST:,}"),
    ],
)
def test_what_is_not_computed_is_told(options, words):
    with pytest.raises(ValueError, match=words):
        kq.separation_rank(**options)


def test_a_rank_of_many_tokens_that_turns_out_too_large_is_told(monkeypatch):
    monkeypatch.setattr("keyquery.learn.depth.separation.LARGEST", 40)
    with pytest.raises(ValueError, match="the separation rank of 2 layers of width 3 may be above 40"):
        kq.separation_rank(2, 3, tokens=4)
