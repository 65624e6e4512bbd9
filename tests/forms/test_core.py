"""Numbers that do not depend on how a form's size is dealt out to its factors, and scale as M does, in any dtype."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from tests.forms.strategies import DEGENERATE, pairs

RATIOS = ("symmetry", "positive_share", "effective_rank", "stable_rank", "column_directionality")
LENGTHS = ("symmetric_eigenvalues", "skew_values", "singular_values", "row_norms", "column_norms", "trace")
# A form that is zero up to rounding has no ratios to compare.
KINDS = tuple(kind for kind in DEGENERATE if kind not in ("cancelling", "near-tied 1e-13"))


def number(form, name):
    value = getattr(form, name)
    return value() if callable(value) else value


def assert_same(form, other, size=1.0, rtol=1e-9):
    """The numbers of `other` are those of `form`, lengths times `size`."""
    for name in RATIOS:
        torch.testing.assert_close(number(other, name), number(form, name), rtol=rtol, atol=1e-9)
    assert all(map(torch.equal, other.signature(), form.signature()))
    top = float(form.singular_values().max()) or 1.0
    for name in LENGTHS:
        given, expected = number(other, name) / size, number(form, name)
        torch.testing.assert_close(given, expected, rtol=rtol, atol=rtol * top)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@pytest.mark.few(8)
def test_each_pair_of_rows_may_be_scaled_against_each_other(kind, data):
    query, key = data.draw(pairs(kinds=(kind,)))
    powers = data.draw(st.lists(st.integers(-400, 400), min_size=query.shape[-2], max_size=query.shape[-2]))
    scale = torch.tensor(powers, dtype=torch.float64).exp2()[:, None]
    form, other = kq.Form(query, key), kq.Form(query * scale, key / scale)
    assert_same(form, other)
    torch.testing.assert_close(other.symmetric.dense(), form.symmetric.dense(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(other.skew.dense(), form.skew.dense(), rtol=1e-10, atol=1e-12)
    covariance, mean = torch.eye(form.dim, dtype=torch.float64), torch.ones(form.dim, dtype=torch.float64)
    bias = torch.ones(form.rank, dtype=torch.float64)
    shares, others = form.shares(covariance, mean, bias), other.shares(covariance, mean, bias * scale[:, 0])
    torch.testing.assert_close(torch.stack(others), torch.stack(shares), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@pytest.mark.few(8)
def test_float64_factors_of_any_size(kind, data):
    query, key = data.draw(pairs(kinds=(kind,)))
    size = 2.0 ** data.draw(st.integers(-480, 480))
    form, other = kq.Form(query, key), kq.Form(query * size, key * size)
    assert_same(form, other, size**2)
    psd, expected = other.nearest("psd"), form.nearest("psd")
    torch.testing.assert_close(psd.dense() / size / size, expected.dense(), rtol=1e-9, atol=1e-9)
    left, values, right = other.svd()
    product = (left * (values / size / size).unsqueeze(-2)) @ right.mT
    torch.testing.assert_close(product, form.dense(), rtol=1e-9, atol=1e-9)
    if form.dim > 1:
        values, source, target = other.skew_planes()
        turn = (source * (values / size / size).unsqueeze(-2)) @ target.mT
        torch.testing.assert_close(turn - turn.mT, form.skew.dense(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("power", [-1000, -400, 400, 900])
def test_data_of_any_size(power):
    """Σ and μ of tokens times 2^power: the shares are the same, and the numbers on data scale with Σ."""
    form = kq.Form(*torch.randn(2, 3, 12, dtype=torch.float64))
    x = torch.randn(40, 12, dtype=torch.float64) + 1
    covariance, mean, bias = torch.cov(x.mT, correction=0), x.mean(0), torch.randn(3, dtype=torch.float64)
    size = 2.0 ** (power // 2)
    expected = form.shares(covariance, mean, bias)
    shares = form.shares(covariance * size * size, mean * size, bias * size)
    torch.testing.assert_close(torch.stack(shares), torch.stack(expected), rtol=1e-12, atol=1e-12)
    on, other = form.on(covariance), form.on(covariance * size * size)
    torch.testing.assert_close(
        other.symmetric_eigenvalues() / size / size, on.symmetric_eigenvalues(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(other.symmetry, on.symmetry)


@pytest.mark.parametrize("size", [1e-12, 1e-18, 1e15, 1e20, 1e30])
def test_float32_norms_of_rows_and_columns_at_any_size(size):
    query, key = torch.randn(2, 3, 20) * size
    M = query.double().mT @ key.double()
    form = kq.Form(query, key)
    torch.testing.assert_close(form.row_norms(), M.norm(dim=-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(form.column_norms(), M.norm(dim=-2), rtol=1e-5, atol=0)
    assert math.isclose(float(form.norm2), float(M.square().sum()), rel_tol=1e-6)
    uneven = torch.eye(3) * torch.tensor([1.0, 1e-22, 1e-30])
    torch.testing.assert_close(kq.Form(uneven, torch.eye(3)).row_norms(), uneven.double().diagonal(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtype", "ratio"),
    [(torch.float32, 1e40), (torch.float32, 1e70), (torch.bfloat16, 1e40), (torch.float16, 1e7), (torch.float16, 1e8)],
)
@pytest.mark.parametrize("part", ["symmetric", "skew"])
def test_parts_of_unbalanced_factors(dtype, ratio, part):
    """Against float64 algebra of the same rounded factors; the error is that of a few roundings of the dtype."""
    root = ratio**0.5
    query, key = torch.randn(2, 4, 12, dtype=torch.float64)
    # Whole numbers over a power of two, so that the small factor has no digits below the range of its dtype.
    query, key = (query.mul(8).round() / 8 * root).to(dtype), (key.mul(8).round() / 8 / root).to(dtype)
    M = query.double().mT @ key.double()
    expected = (M + M.mT) / 2 if part == "symmetric" else (M - M.mT) / 2
    given = getattr(kq.Form(query, key), part)
    product = given.query.double().mT @ given.key.double()
    assert (product - expected).norm() <= 4 * torch.finfo(dtype).eps * M.norm()


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("distance", [1e-1, 1e-3, 1e-4, 1e-6, 1e-11])
def test_nearly_tied_factors_keep_the_digits_of_their_skew_part(rank, distance):
    query, difference = torch.randn(2, rank, 60, dtype=torch.float64)
    key = query + distance * difference
    exact = key - query  # without rounding, since they are so close: A = (QᵀE − EᵀQ)/2
    expected = torch.linalg.svdvals((query.mT @ exact - exact.mT @ query) / 2)[: 2 * rank]
    values = kq.Form(query, key).skew_values()
    assert ((values - expected).abs() / expected[0]).max() < 1e-11


@pytest.mark.parametrize("size", [1.0, 8.0, 1e10])
def test_from_gram_has_orthogonal_columns_and_zeros_where_the_rank_is_less(size):
    """As surgery inverts them: each column over its square."""
    x = torch.randn(8, 5, dtype=torch.float64)
    x[:4] *= size
    form = kq.Form.from_gram(x @ x.mT)
    rows = torch.cat((form.query, form.key), -2)
    assert (rows != 0).any(0).sum() == 5
    inner = rows.mT @ rows
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-14 * inner.max()
    error = (rows @ rows.mT - x @ x.mT).abs() / (x.norm(dim=1)[:, None] * x.norm(dim=1))
    assert error.max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_gram_norms_and_parts_of_grouped_queries_are_the_dense_ones(dtype, size):
    query, key = (size * torch.randn(2, 3, 4, 20)).to(dtype), (torch.randn(2, 1, 4, 20) / size).to(dtype)
    form = kq.Form(query, key)
    rows = torch.cat((query.double(), key.double().expand(2, 3, -1, -1)), dim=-2)
    lengths = torch.linalg.vector_norm(rows, dim=-1)
    scale = lengths.unsqueeze(-1) * lengths.unsqueeze(-2)
    torch.testing.assert_close(form.gram() / scale, rows @ rows.mT / scale, rtol=0, atol=1e-14)
    dense = query.double().mT @ key.double()
    for name, dim in (("row_norms", -1), ("column_norms", -2)):
        expected = torch.linalg.vector_norm(dense, dim=dim)
        torch.testing.assert_close(getattr(form, name)(), expected, rtol=1e-10, atol=0)
    for sign, energy in zip((1, -1), form.core().energies, strict=True):
        expected = ((dense + sign * dense.mT) / 2).square().sum((-2, -1))
        torch.testing.assert_close(energy, expected, rtol=1e-10, atol=0)
