"""Derivatives of a form's metrics, against finite differences, on both ways to the core."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacrev, vmap

import keyquery as kq

# Smooth functions of the spectra: single values have kinks where they cross.
SMOOTH = {
    "norm2": lambda form: form.norm2,
    "symmetry": lambda form: form.symmetry,
    "trace": lambda form: form.trace(),
    "trace of S³": lambda form: form.symmetric_eigenvalues().pow(3).sum(-1),
    "‖A‖⁴": lambda form: form.skew_values().pow(4).sum(-1),
    "σ⁴": lambda form: form.singular_values().pow(4).sum(-1),
    "row_norms": lambda form: form.row_norms(),
    "column_norms": lambda form: form.column_norms(),
    "positive_share": lambda form: form.positive_share,
    "on": lambda form: form.on(COVARIANCE).symmetric_eigenvalues().pow(3).sum(-1),
    "shares": lambda form: torch.stack(form.shares(COVARIANCE, COVARIANCE[0])),
}
COVARIANCE = torch.cov(torch.randn(7, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))


def random_pair(rank=2, dim=7):
    return tuple(t.requires_grad_() for t in (torch.randn(2, rank, dim, dtype=torch.float64) / 3).unbind())


def tied_pair(rank=2, dim=7):
    query = torch.randn(rank, dim, dtype=torch.float64) / 3
    return query.clone().requires_grad_(), query.clone().requires_grad_()


def half_zero_pair():
    query, key = torch.randn(2, 2, 7, dtype=torch.float64) / 3
    query[0] = 0
    return query.requires_grad_(), key.requires_grad_()


PAIRS = {
    "random": random_pair,
    "tied": tied_pair,
    "a zero row": half_zero_pair,
    "2r > d": lambda: random_pair(4, 7),
    "r > d": lambda: random_pair(8, 7),
}
# positive_share and the norms of zero rows or columns have kinks that finite differences would meet.
KINKED = [(n, p) for n in ("positive_share", "row_norms", "column_norms") for p in ("tied", "a zero row")]
CASES = [(n, p) for n in SMOOTH for p in PAIRS if (n, p) not in KINKED]


@pytest.mark.parametrize(("number", "pair"), CASES)
@pytest.mark.few(12)
def test_first_derivatives(number, pair):
    assert gradcheck(lambda q, k: SMOOTH[number](kq.Form(q, k)), PAIRS[pair]())


@pytest.mark.parametrize("rank", [2, 4])  # 4: the factors fill the space
def test_second_derivatives_of_independent_factors(rank):
    assert gradgradcheck(lambda q, k: SMOOTH["trace of S³"](kq.Form(q, k)), random_pair(rank))
    query, key = (t.detach() for t in random_pair(rank))
    expected = torch.autograd.functional.jacobian(lambda q: kq.Form(q, key).symmetry, query)
    torch.testing.assert_close(jacrev(lambda q: kq.Form(q, key).symmetry)(query), expected)


def test_second_derivatives_of_dependent_factors_are_refused_rather_than_wrong():
    query = torch.randn(2, 7, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.functional.hessian(lambda q: kq.Form(q, q).norm2, query)


def test_one_tied_head_does_not_disturb_the_others():
    query, key = (torch.randn(2, 3, 2, 9, dtype=torch.float64) / 3).unbind()
    key[1] = query[1]
    query, key = query.requires_grad_(), key.requires_grad_()
    assert gradcheck(lambda q, k: kq.Form(q, k).symmetric_eigenvalues().pow(3).sum(-1), (query, key))


@pytest.mark.parametrize("name", ["effective_rank", "stable_rank", "column_directionality"])
def test_gradients_of_tied_factors_are_finite(name):
    query, key = tied_pair()
    getattr(kq.Form(query, key), name)().backward()
    assert torch.isfinite(query.grad).all()
    assert torch.isfinite(key.grad).all()


def test_the_gradient_of_a_zero_form_is_zero_not_nan():
    query, key = torch.zeros(2, 7, requires_grad=True), torch.zeros(2, 7, requires_grad=True)
    form = kq.Form(query, key)
    (form.symmetry + form.effective_rank() + form.positive_share + form.norm2).backward()
    assert not query.grad.any()
    assert not key.grad.any()


@pytest.mark.parametrize("pair", ["random", "2r > d"])
def test_vectors_and_projections_have_derivatives(pair):
    def vectors(q, k):
        form = kq.Form(q, k)
        values, directions = form.eigh(2)
        near = form.nearest("symmetric", rank=2), form.nearest("psd"), form.nearest("psd", rank=1)
        return values, directions.abs(), form.svd(1).left.abs(), *(one.dense() for one in near)  # signs are free

    assert gradcheck(vectors, PAIRS[pair]())


def test_gradients_do_not_depend_on_the_size_of_the_factors():
    query, key = random_pair()
    expected = torch.autograd.grad(kq.Form(query, key).symmetry, query)[0]
    for size in (2.0**-300, 2.0**300):
        small = (query * size).detach().requires_grad_()
        slope = torch.autograd.grad(kq.Form(small, key / size).symmetry, small)[0]
        torch.testing.assert_close(slope * size, expected)


def test_vectors_without_derivatives_say_so():
    query, key = tied_pair()
    nothing = torch.zeros(2, 7, dtype=torch.float64, requires_grad=True)
    for subject, vectors in (
        ("planes", lambda: kq.Form(query, key).skew_planes().values),
        ("eigenvectors", lambda: kq.Form(query, key).nearest("psd").query),
        ("singular triples", lambda: kq.Form(nothing, key).svd().left),
    ):
        with pytest.raises(RuntimeError, match=f"{subject} have no derivatives where"):
            vectors().sum().backward()


@pytest.mark.unchecked
def test_vmap_is_refused_in_one_sentence():
    factors = torch.randn(3, 2, 7)
    with pytest.raises(RuntimeError, match="query is batched by vmap, which Form does not support: use leading dim"):
        vmap(lambda q: kq.Form(q, q).norm2)(factors)
