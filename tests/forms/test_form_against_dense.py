"""Every row of the Form's table against dense float64 algebra, over batches, ranks and degenerate factors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.testing import check_form
from tests.forms.strategies import DEGENERATE, covariances, forms, pairs


def relative(given, expected, scale):
    assert given.shape == expected.shape
    return float((given.double() - expected).abs().max() / max(float(scale), 1e-30))


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(data=st.data())
def test_every_number_equals_the_dense_one(kind, dtype, data):
    check_form(kq.Form(*data.draw(pairs(kinds=(kind,), dtype=dtype))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_measured_exactly(dtype):
    query, key = (torch.randn(2, 3, 10).to(dtype) for _ in range(2))
    short, long = kq.Form(query, key), kq.Form(query.double(), key.double())
    check_form(short)
    for name in ("eigenvalues", "skew_values", "singular_values", "row_norms", "directionality"):
        torch.testing.assert_close(getattr(short, name)(), getattr(long, name)(), rtol=1e-12, atol=1e-12)


@given(form=forms(), data=st.data())
def test_on_data_is_the_form_between_square_roots_of_the_covariance(form, data):
    covariance = data.draw(covariances(form.dim))
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.mT
    on = form.on(covariance)
    scale = float((form.query @ root).norm() * (form.key @ root).norm())
    assert relative(on.dense(), root @ form.dense() @ root, scale) <= 1e-12
    assert relative(on.mT.dense(), root @ form.mT.dense() @ root, scale) <= 1e-12
    check_form(on)
    check_form(on.symmetric)
    check_form(on - form.mT.on(covariance))


def test_on_sample_centres_and_averages():
    form = kq.Form(*torch.randn(2, 3, 12, dtype=torch.float64))
    x = torch.randn(40, 12, dtype=torch.float64) + 5
    covariance = torch.cov(x.mT, correction=0)
    torch.testing.assert_close(form.on_sample(x).eigenvalues(), form.on(covariance).eigenvalues())


@given(form=forms(), data=st.data())
def test_scores(form, data):
    n, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    x, y = torch.randn(n, form.dim, dtype=torch.float64), torch.randn(m, form.dim, dtype=torch.float64)
    M = form.query.mT @ form.key
    scale = float(form.query.norm() * form.key.norm() * x.norm() * y.norm())
    assert relative(form.scores(x, y), x @ M @ y.mT, scale) <= 1e-10
    assert relative(form.scores(x), x @ M @ x.mT, scale) <= 1e-10
    assert relative(form.scores(x[0], y), (x @ M @ y.mT)[..., 0, :], scale) <= 1e-10
    assert relative(form.scores(x, y[0]), (x @ M @ y.mT)[..., 0], scale) <= 1e-10
    assert relative(form.scores(x[0], y[0]), (x @ M @ y.mT)[..., 0, 0], scale) <= 1e-10


def test_scores_broadcast_sentences_against_heads():
    form = kq.Form(torch.randn(4, 2, 8), torch.randn(4, 2, 8))
    x = torch.randn(5, 1, 7, 8)
    expected = torch.einsum("bnd,hrd,hre,bme->bhnm", x[:, 0], form.query, form.key, x[:, 0])
    torch.testing.assert_close(form.scores(x), expected, rtol=1e-4, atol=1e-4)


@given(first=forms(kinds=("random", "tied")), data=st.data())
def test_algebra_is_that_of_matrices(first, data):
    factors = torch.randn(2, *first.batch, 3, first.dim, dtype=torch.float64)
    second = kq.Form(*factors)
    a, b, c = first.dense(), second.dense(), data.draw(st.floats(-3, 3).filter(lambda c: abs(c) > 0.1))
    basis = torch.randn(first.dim, 5, dtype=torch.float64)
    for form, expected in (
        (first + second, a + b),
        (first - second, a - b),
        (-first, -a),
        (c * first, c * a),
        (first * c, c * a),
        (first / c, a / c),
        (first.mT, a.mT),
        (first.change_basis(basis), basis.mT @ a @ basis),
        ((first + second).symmetric, (a + b + (a + b).mT) / 2),
        ((first - second.mT).skew, (a - b.mT - (a - b.mT).mT) / 2),
    ):
        torch.testing.assert_close(form.dense(), expected, rtol=1e-10, atol=1e-9)
        check_form(form)


def test_a_tensor_scales_each_form_of_the_batch():
    form = kq.Form(torch.randn(3, 2, 5), torch.randn(3, 2, 5))
    scale = torch.tensor([1.0, -2.0, 0.5])
    torch.testing.assert_close((form * scale).dense(), form.dense() * scale[:, None, None])
    torch.testing.assert_close((form / scale).dense(), form.dense() / scale[:, None, None])


@pytest.mark.parametrize(("batch", "dim"), [((4,), 0), ((2, 3), 0), ((2, 3), -1), ((2, 3), 1)])
def test_sum_over_heads(batch, dim):
    form = kq.Form(*torch.randn(2, *batch, 3, 7, dtype=torch.float64))
    torch.testing.assert_close(form.sum(dim).dense(), form.dense().sum(dim if dim >= 0 else len(batch) + dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_sum_over_grouped_queries_adds_them_first(dim):
    form = kq.Form(torch.randn(2, 4, 3, 20, dtype=torch.float64), torch.randn(2, 1, 3, 20, dtype=torch.float64))
    together = form.sum(dim)
    assert together.rank == (3 if dim == 1 else 6)
    torch.testing.assert_close(together.dense(), form.dense().sum(dim))


def test_grouped_keys_are_kept_once_and_measured_right():
    query, key = torch.randn(2, 4, 3, 20, dtype=torch.float64), torch.randn(2, 1, 3, 20, dtype=torch.float64)
    grouped, repeated = kq.Form(query, key), kq.Form(query, key.expand_as(query).contiguous())
    check_form(grouped)
    assert grouped.batch == (2, 4)
    torch.testing.assert_close(grouped.skew_values(), repeated.skew_values())
    torch.testing.assert_close(grouped[1, 2].dense(), repeated.dense()[1, 2])


@given(form=forms(kinds=("random", "near-tied 1e-3")), data=st.data())
def test_leading_directions_are_the_best_of_their_rank(form, data):
    """Eckart–Young: what k directions leave is what the other values hold."""
    M = form.dense()
    k = data.draw(st.integers(1, min(form.rank, form.dim)))
    left, values, right = form.svd(k)
    error = torch.linalg.matrix_norm(M - (left * values.unsqueeze(-2)) @ right.mT)
    torch.testing.assert_close(error, torch.linalg.svdvals(M)[..., k:].norm(dim=-1), rtol=1e-7, atol=1e-9)
    k = data.draw(st.integers(1, min(2 * form.rank, form.dim)))
    S = (M + M.mT) / 2
    values, vectors = form.eigh(k)
    error = torch.linalg.matrix_norm(S - (vectors * values.unsqueeze(-2)) @ vectors.mT)
    left_out = torch.linalg.svdvals(S)[..., k:].norm(dim=-1)
    torch.testing.assert_close(error, left_out, rtol=1e-7, atol=1e-9)
    assert (values.diff(dim=-1) <= 0).all()
    symmetric = form.nearest("symmetric", rank=k)
    assert symmetric.rank == k
    torch.testing.assert_close(torch.linalg.matrix_norm(S - symmetric.dense()), left_out, rtol=1e-7, atol=1e-9)


@given(form=forms(kinds=("random", "near-tied 1e-3"), most_dim=10), data=st.data())
def test_nearest_skew_of_a_rank(form, data):
    if form.dim == 1:
        assert form.nearest("skew").dense().abs().max() <= 1e-14 * form.norm2.sqrt().max()
        return
    planes = data.draw(st.integers(1, min(2 * form.rank, form.dim) // 2))
    A = (form.dense() - form.dense().mT) / 2
    skew = form.nearest("skew", rank=2 * planes).dense()
    torch.testing.assert_close(skew, -skew.mT)
    left_out = torch.linalg.svdvals(A)[..., 2 * planes :].norm(dim=-1)
    torch.testing.assert_close(torch.linalg.matrix_norm(A - skew), left_out, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(form.nearest("skew").dense(), A)


@given(form=forms(kinds=("random", "tied", "skew", "zero")), data=st.data())
def test_nearest_psd_of_a_rank(form, data):
    rank = data.draw(st.integers(1, form.dim))
    psd = form.nearest("psd", rank=rank)
    assert psd.query is psd.key
    values, vectors = torch.linalg.eigh((form.dense() + form.dense().mT) / 2)
    values[..., : max(form.dim - rank, 0)] = 0
    expected = (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
    torch.testing.assert_close(psd.dense(), expected, rtol=1e-7, atol=1e-8)


@given(form=forms(kinds=("tied", "rank one", "zero")))
def test_distance_of_a_psd_form(form):
    form = form.nearest("psd")
    x, y = torch.randn(4, form.dim, dtype=torch.float64), torch.randn(3, form.dim, dtype=torch.float64)
    gap = x[:, None] - y
    expected = torch.einsum("nmd,...de,nme->...nm", gap, form.dense(), gap).clamp(min=0).sqrt()
    torch.testing.assert_close(form.distance(x, y), expected, rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(form.distance(x[0], y[0]), expected[..., 0, 0], rtol=1e-7, atol=1e-6)


@given(pair=pairs(kinds=("random", "tied")))
def test_with_bias_is_the_score_of_biased_projections(pair):
    query, key = pair
    dim = query.shape[-1]
    bias_query, bias_key = torch.randn(2, *query.shape[:-1], dtype=torch.float64)
    x, y = torch.randn(3, dim, dtype=torch.float64), torch.randn(2, dim, dtype=torch.float64)
    q, k = x @ query.mT + bias_query.unsqueeze(-2), y @ key.mT + bias_key.unsqueeze(-2)
    one = torch.ones(3, 1, dtype=torch.float64)
    form = kq.Form(query, key).with_bias(bias_query, bias_key)
    scores = form.scores(torch.cat((x, one), -1), torch.cat((y, one[:2]), -1))
    torch.testing.assert_close(scores, q @ k.mT, rtol=1e-9, atol=1e-9)
    check_form(form)


@pytest.mark.parametrize("kind", ["excess", "norms"])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@given(form=forms(kinds=("random", "fading rows", "unequal sizes"), most_dim=14))
def test_directionality_by_the_definition(kind, gamma, form):
    M = form.dense().reshape(-1, form.dim, form.dim).numpy()
    expected = []
    for matrix in M:
        sums = []
        for axis in (1, 0):
            norms = (matrix**2).sum(axis) ** 0.5
            threshold = norms.mean() + gamma * (norms.std(ddof=1) if len(norms) > 1 else 0.0)
            out = norms[norms > threshold + 1e-11 * norms.max()]
            sums.append((out - threshold).sum() if kind == "excess" else out.sum())
        row, column = sums
        expected.append((row - column) / (row + column) if row + column > 0 else 0.0)
    given = form.directionality(gamma, kind).reshape(-1)
    torch.testing.assert_close(given, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)
