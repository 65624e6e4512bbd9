"""Every row of the Form's table against dense float64 algebra, over batches, ranks and degenerate factors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.testing import check_form
from tests.forms.strategies import DEGENERATE, assert_near, forms, pairs, samples

DTYPES = [torch.float64, torch.float32]


def wide(form):
    """M in float64, and the size of its factors, which bounds what rounding can do."""
    query, key = form.query.double(), form.key.double()
    return query.mT @ key, float(query.norm() * key.norm())


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(data=st.data())
@pytest.mark.few(16)
def test_every_number_equals_the_dense_one(kind, dtype, data):
    check_form(kq.Form(*data.draw(pairs(kinds=(kind,), dtype=dtype))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_measured_exactly(dtype):
    query, key = (torch.randn(2, 3, 10).to(dtype) for _ in range(2))
    short, long = kq.Form(query, key), kq.Form(query.double(), key.double())
    check_form(short)
    for name in ("symmetric_eigenvalues", "skew_values", "singular_values"):
        torch.testing.assert_close(getattr(short, name)(), getattr(long, name)(), rtol=1e-12, atol=1e-12)
    for name in ("row_norms", "column_norms"):
        torch.testing.assert_close(getattr(short, name)(), getattr(long, name)(), rtol=1e-5, atol=1e-6)


@given(form=forms(), data=st.data())
def test_on_data_is_the_form_between_square_roots_of_the_covariance(form, data):
    x = data.draw(samples(form.dim))
    covariance = x.mT @ x / len(x)
    _, values, vh = torch.linalg.svd(x / len(x) ** 0.5, full_matrices=False)
    root = (vh.mT * values) @ vh  # from the tokens: the covariance itself has lost half of the small values' digits
    on = form.on(covariance)
    scale = (form.query @ root).norm() * (form.key @ root).norm() + 1e-6 * form.query.norm() * form.key.norm()
    assert_near(on.dense(), root @ form.dense() @ root, scale)
    assert_near(on.mT.dense(), root @ form.mT.dense() @ root, scale)
    small = x @ form.dense() @ x.mT / len(x)
    assert_near(on.norm2.sqrt(), torch.linalg.matrix_norm(small), scale)
    count = min(2 * form.rank, form.dim, len(x))
    for values, part in ((on.skew_values(), small - small.mT), (on.symmetric_eigenvalues().abs(), small + small.mT)):
        largest = values.sort(descending=True).values[..., :count]
        assert_near(largest, torch.linalg.svdvals(part / 2)[..., :count], scale)
    check_form(on)
    check_form(on.symmetric)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_scores(dtype, data):
    form = data.draw(forms(dtype=dtype))
    n, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    x, y = torch.randn(n, form.dim, dtype=dtype), torch.randn(m, form.dim, dtype=dtype)
    M, size = wide(form)
    xy, xx = x.double() @ M @ y.double().mT, x.double() @ M @ x.double().mT
    scale = size * (float(x.norm()) + float(y.norm())) ** 2
    assert_near(form.scores(x, y), xy, scale, dtype)
    assert_near(form.scores(x), xx, scale, dtype)
    assert_near(form.scores(x[0], y), xy[..., 0, :], scale, dtype)
    assert_near(form.scores(x, y[0]), xy[..., 0], scale, dtype)
    assert_near(form.scores(x[0], y[0]), xy[..., 0, 0], scale, dtype)


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


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("keys", [1, 4])
def test_sum_over_heads_adds_grouped_queries_first(dim, keys):
    form = kq.Form(torch.randn(2, 4, 3, 20, dtype=torch.float64), torch.randn(2, keys, 3, 20, dtype=torch.float64))
    together = form.sum(dim)
    assert together.rank == (6 if dim == 0 else 3 if keys == 1 else 12)
    torch.testing.assert_close(together.dense(), form.dense().sum(dim % 2))


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_leading_directions_are_the_best_of_their_rank(dtype, data):
    """Eckart–Young: what k directions leave is what the other values hold."""
    form = data.draw(forms(dtype=dtype))
    M, size = wide(form)
    S, A = (M + M.mT) / 2, (M - M.mT) / 2
    k = data.draw(st.integers(1, min(form.rank, form.dim)))
    left, values, right = form.svd(k)
    error = torch.linalg.matrix_norm(M - (left * values.unsqueeze(-2)) @ right.mT)
    assert_near(error, torch.linalg.svdvals(M)[..., k:].norm(dim=-1), size)
    for vectors in (left, right):
        assert_near(vectors.mT @ vectors, torch.eye(k, dtype=torch.float64).expand(*form.batch, k, k), 1)
    k = data.draw(st.integers(1, min(2 * form.rank, form.dim)))
    values, vectors = form.eigh(k)
    left_out = torch.linalg.svdvals(S)[..., k:].norm(dim=-1)
    assert_near(torch.linalg.matrix_norm(S - (vectors * values.unsqueeze(-2)) @ vectors.mT), left_out, size)
    assert (values.diff(dim=-1) <= 0).all()
    symmetric = form.nearest("symmetric", rank=k)
    assert symmetric.rank == k
    assert_near(torch.linalg.matrix_norm(S - wide(symmetric)[0]), left_out, size, dtype)
    if form.dim > 1:
        k = data.draw(st.integers(1, min(2 * form.rank, form.dim) // 2))
        skew = wide(form.nearest("skew", rank=2 * k))[0]
        assert_near(skew, -skew.mT, size, dtype)
        left_out = torch.linalg.svdvals(A)[..., 2 * k :].norm(dim=-1)
        assert_near(torch.linalg.matrix_norm(A - skew), left_out, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_nearest_psd_of_a_rank(dtype, data):
    form = data.draw(forms(dtype=dtype))
    rank = data.draw(st.integers(1, form.dim))
    psd = form.nearest("psd", rank=rank)
    assert psd.query is psd.key
    M, size = wide(form)
    values, vectors = torch.linalg.eigh((M + M.mT) / 2)
    values[..., : max(form.dim - rank, 0)] = 0
    expected = (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
    # Eigenvalues that are equal may be cut in any order: distances are unique, the form is not.
    error = torch.linalg.matrix_norm(M - wide(psd)[0])
    assert_near(error, torch.linalg.matrix_norm(M - expected), size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_distance_of_a_psd_form(dtype, data):
    form = data.draw(forms(kinds=("random", "tied", "rank one", "zero", "fading rows"), dtype=dtype)).nearest("psd")
    x, y = torch.randn(4, form.dim, dtype=dtype), torch.randn(3, form.dim, dtype=dtype)
    M, size = wide(form)
    gap = x.double()[:, None] - y.double()
    expected = torch.einsum("nmd,...de,nme->...nm", gap, M, gap).clamp(min=0)
    scale = size * float(gap.norm()) ** 2
    assert_near(form.distance(x, y).square(), expected, scale, dtype)
    assert_near(form.distance(x[0], y[0]).square(), expected[..., 0, 0], scale, dtype)
    untied = kq.Form(form.query, form.key.clone())
    assert_near(untied.distance(x, y).square(), expected, scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_with_bias_is_the_score_of_biased_projections(dtype, data):
    query, key = data.draw(pairs(dtype=dtype))
    dim = query.shape[-1]
    bias_query, bias_key = torch.randn(2, *query.shape[:-1], dtype=dtype)
    x, y = torch.randn(3, dim, dtype=dtype), torch.randn(2, dim, dtype=dtype)
    q = x.double() @ query.double().mT + bias_query.double().unsqueeze(-2)
    k = y.double() @ key.double().mT + bias_key.double().unsqueeze(-2)
    one = torch.ones(3, 1, dtype=dtype)
    form = kq.Form(query, key).with_bias(bias_query, bias_key)
    scores = form.scores(torch.cat((x, one), -1), torch.cat((y, one[:2]), -1))
    assert_near(scores, q @ k.mT, q.norm() * k.norm(), dtype)
    check_form(form)


@pytest.mark.parametrize("kind", ["excess", "norms"])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@given(form=forms(kinds=("random", "near-tied 1e-5", "fading rows", "unequal sizes", "a zero row")))
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
    given = form.column_directionality(gamma, kind).reshape(-1)
    torch.testing.assert_close(given, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
