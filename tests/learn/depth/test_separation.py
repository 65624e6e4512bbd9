"""Separation ranks: against the polynomials themselves, in exact fractions, and between the bounds."""

import math
from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.learn.depth.separation import LARGEST, log_rank_of_two, rank_of_two


def times(p, q):
    """The product of two polynomials, each {exponents: coefficient}."""
    found = Counter()
    for (a, x), (b, y) in product(p.items(), q.items()):
        found[tuple(map(sum, zip(a, b, strict=True)))] += x * y
    return found


def plus(terms):
    found = Counter()
    for term in terms:
        for power, value in term.items():
            found[power] += value
    return found


def mapped(matrix, vector):
    """A matrix of numbers times a vector of polynomials."""
    return [
        plus({power: int(w) * value for power, value in entry.items()} for w, entry in zip(row, vector, strict=True))
        for row in matrix
    ]


def rank_by_coefficients(layers, width, heads, tokens):
    """The rank of y₁'s coefficients, monomials of the first half by monomials of the second, in fractions."""
    rng, variables = np.random.default_rng(1), tokens * width
    x = [
        [Counter({tuple(int(i == t * width + j) for i in range(variables)): 1}) for j in range(width)]
        for t in range(tokens)
    ]
    for _ in range(layers):
        weights = rng.integers(-999, 1000, (heads, 4, width // heads, width))
        out = [[] for _ in range(tokens)]
        for query, key, value, output in weights:
            q, k, v = ([mapped(part, token) for token in x] for part in (query, key, value))
            for i in range(tokens):
                scores = [plus(times(a, b) for a, b in zip(q[i], k[j], strict=True)) for j in range(tokens)]
                seen = [plus(times(scores[j], v[j][r]) for j in range(tokens)) for r in range(len(v[0]))]
                out[i].append(mapped(output.T, seen))
        x = [[plus(parts) for parts in zip(*heads_out, strict=True)] for heads_out in out]
    half = variables // 2
    rows, columns = ({power[part] for power in x[0][0]} for part in (slice(None, half), slice(half, None)))
    matrix = [[Fraction(x[0][0].get(a + b, 0)) for b in sorted(columns)] for a in sorted(rows)]
    return rank_of(matrix)


def rank_of(rows):
    rank = 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            if factor := rows[i][column] / rows[rank][column]:
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


@pytest.mark.parametrize(
    ("layers", "width", "heads", "tokens"),
    [(1, 2, 1, 2), (1, 3, 1, 2), (1, 4, 2, 2), (2, 1, 1, 2), (2, 2, 1, 2), (2, 2, 2, 2), (1, 2, 1, 4), (2, 1, 1, 4)],
)
def test_the_rank_is_that_of_the_polynomial(layers, width, heads, tokens):
    assert kq.separation_rank(layers, width, heads, tokens) == rank_by_coefficients(layers, width, heads, tokens)


@pytest.mark.parametrize(
    ("layers", "width", "rank"), [(1, 2, 3), (1, 4, 5), (2, 2, 15), (2, 3, 35), (2, 4, 70), (3, 2, 105)]
)
def test_ranks_of_two_tokens_meet_their_bound(layers, width, rank):
    assert kq.separation_rank(layers, width) == rank_of_two(layers, width) == rank
    if width % 2 == 0 and width > 2:
        assert kq.separation_rank(layers, width, heads=2) == rank


@pytest.mark.parametrize(
    ("layers", "width", "heads", "rank"),
    [(1, 8, 1, 9), (1, 16, 1, 17), (2, 2, 1, 18), (2, 3, 1, 49), (2, 4, 2, 107), (3, 2, 1, 232)],
)
def test_ranks_of_four_tokens(layers, width, heads, rank):
    assert kq.separation_rank(layers, width, heads, tokens=4) == rank


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
