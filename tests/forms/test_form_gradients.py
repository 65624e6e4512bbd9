"""Derivatives of a form's numbers, against finite differences, on both ways to the core."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import keyquery as kq

# Smooth functions of the spectra: single values have kinks where they cross.
SMOOTH = {
    "norm2": lambda form: form.norm2,
    "symmetry": lambda form: form.symmetry,
    "trace": lambda form: form.trace(),
    "trace of S³": lambda form: form.eigenvalues().pow(3).sum(-1),
    "‖A‖⁴": lambda form: form.skew_values().pow(4).sum(-1),
    "σ⁴": lambda form: form.singular_values().pow(4).sum(-1),
    "row_norms": lambda form: form.row_norms(),
    "column_norms": lambda form: form.column_norms(),
    "positive_share": lambda form: form.positive_share,
}

COVARIANCE = torch.cov(torch.randn(7, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
ON = {
    "on": lambda form: form.on(COVARIANCE).eigenvalues().pow(3).sum(-1),
    "shares": lambda form: torch.stack(form.shares(COVARIANCE, COVARIANCE[0])),
}


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
CASES = [(n, p) for n in (*SMOOTH, *ON) for p in PAIRS if (n, p) not in KINKED]


@pytest.mark.parametrize(("number", "pair"), CASES)
def test_first_derivatives(number, pair):
    assert gradcheck(lambda q, k: {**SMOOTH, **ON}[number](kq.Form(q, k)), PAIRS[pair]())


@pytest.mark.parametrize("number", ["norm2", "symmetry", "trace of S³", "σ⁴"])
def test_second_derivatives_of_independent_factors(number):
    assert gradgradcheck(lambda q, k: SMOOTH[number](kq.Form(q, k)), random_pair())


@pytest.mark.parametrize("number", ["norm2", "trace of S³", "σ⁴"])
def test_second_derivatives_where_the_factors_fill_the_space(number):
    assert gradgradcheck(lambda q, k: SMOOTH[number](kq.Form(q, k)), random_pair(4, 7))


def test_second_derivatives_of_dependent_factors_are_refused_rather_than_wrong():
    query = torch.randn(2, 7, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.functional.hessian(lambda q: kq.Form(q, q).norm2, query)
    query, key = tied_pair()
    slope = torch.autograd.grad(kq.Form(query, key).norm2, query, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad((slope * query).sum(), query)


def test_one_tied_head_does_not_disturb_the_others():
    query, key = (torch.randn(2, 3, 2, 9, dtype=torch.float64) / 3).unbind()
    key[1] = query[1]
    query, key = query.requires_grad_(), key.requires_grad_()
    assert gradcheck(lambda q, k: kq.Form(q, k).eigenvalues().pow(3).sum(-1), (query, key))
    torch.testing.assert_close(kq.Form(query, key).skew_values()[0], kq.Form(query[0], key[0]).skew_values())


@pytest.mark.parametrize("name", ["effective_rank", "stable_rank", "directionality"])
@pytest.mark.parametrize("pair", ["random", "tied"])
def test_gradients_are_finite(name, pair):
    query, key = PAIRS[pair]()
    getattr(kq.Form(query, key), name)().backward()
    assert torch.isfinite(query.grad).all()
    assert torch.isfinite(key.grad).all()


def test_the_gradient_of_a_zero_form_is_zero_not_nan():
    query, key = torch.zeros(2, 7, requires_grad=True), torch.zeros(2, 7, requires_grad=True)
    form = kq.Form(query, key)
    (form.symmetry + form.effective_rank() + form.positive_share + form.norm2).backward()
    assert not query.grad.any()
    assert not key.grad.any()


def test_vectors_and_projections_have_derivatives():
    assert gradcheck(lambda q, k: kq.Form(q, k).nearest("symmetric", rank=2).dense(), random_pair())
    assert gradcheck(lambda q, k: kq.Form(q, k).nearest("psd").dense(), random_pair())
    assert gradcheck(lambda q, k: kq.Form(q, k).scores(COVARIANCE), random_pair())


def test_distance_of_a_tied_form_has_derivatives():
    x, y = torch.randn(2, 3, 7, dtype=torch.float64)
    query = (torch.randn(2, 7, dtype=torch.float64) / 3).requires_grad_()
    assert gradcheck(lambda q: kq.Form(q, q).distance(x, y), (query,))


def test_a_form_can_be_used_for_two_backward_passes():
    query, key = random_pair()
    form = kq.Form(query, key)
    form.symmetry.backward()
    form.norm2.backward()
    assert torch.isfinite(query.grad).all()
