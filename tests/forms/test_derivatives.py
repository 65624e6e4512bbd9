"""Derivatives of a form's numbers, against finite differences, on both ways to the core."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, vmap

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
}

COVARIANCE = torch.cov(torch.randn(7, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
ON = {
    "on": lambda form: form.on(COVARIANCE).symmetric_eigenvalues().pow(3).sum(-1),
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
@pytest.mark.few(12)
def test_first_derivatives(number, pair):
    assert gradcheck(lambda q, k: {**SMOOTH, **ON}[number](kq.Form(q, k)), PAIRS[pair]())


@pytest.mark.parametrize("number", ["norm2", "symmetry", "trace of S³", "σ⁴"])
@pytest.mark.parametrize("rank", [2, 4])  # 4: the factors fill the space
def test_second_derivatives_of_independent_factors(number, rank):
    assert gradgradcheck(lambda q, k: SMOOTH[number](kq.Form(q, k)), random_pair(rank))


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
    assert gradcheck(lambda q, k: kq.Form(q, k).symmetric_eigenvalues().pow(3).sum(-1), (query, key))
    torch.testing.assert_close(kq.Form(query, key).skew_values()[0], kq.Form(query[0], key[0]).skew_values())


@pytest.mark.parametrize("name", ["effective_rank", "stable_rank", "column_directionality"])
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


REPEATED = torch.diag(torch.tensor([2.0, 2.0, 1.0, 0.0, 0.0])).double()


@pytest.mark.parametrize("pair", ["tied", "a zero row", "2r > d"])
def test_projections_of_dependent_factors_have_derivatives(pair):
    def projected(q, k):
        form = kq.Form(q, k)
        low = form.nearest("psd", rank=1).norm2, form.nearest("symmetric", rank=2).dense()
        # Where a row is zero, S can get a positive eigenvalue by any change of it: a kink.
        return low if pair == "a zero row" else (form.nearest("psd").dense(), *low)

    assert gradcheck(projected, PAIRS[pair]())


def test_projections_of_repeated_eigenvalues_have_derivatives():
    """S = diag(2, 2, 1, 0, 0) of the family Qᵀ·diag·Q: any turn of the pair of 2s is as good, the form is not."""
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q[:3].requires_grad_()
    gains = REPEATED.diagonal()[:3, None]
    assert gradcheck(lambda q: kq.Form(q * gains, q).nearest("psd").dense(), (turn,))
    assert gradcheck(lambda q: kq.Form(q * gains, q).nearest("symmetric", rank=3).dense(), (turn,))
    # Of rank 2 it is cut between 2 and 1: the projection onto the pair.
    assert gradcheck(lambda q: kq.Form(q * gains, q).nearest("symmetric", rank=2).dense(), (turn,))


@pytest.mark.parametrize("pair", ["random", "tied", "a zero row", "2r > d"])
def test_eigenpairs_have_derivatives_where_they_are_functions_of_the_form(pair):
    def pairs(q, k):
        values, vectors = kq.Form(q, k).eigh(2)
        return values, vectors.abs()  # signs are free

    assert gradcheck(pairs, PAIRS[pair]())


def test_distance_of_a_form_tied_by_a_copy_has_derivatives():
    x, y = torch.randn(2, 3, 7, dtype=torch.float64)
    query = (torch.randn(2, 7, dtype=torch.float64) / 3).requires_grad_()
    assert gradcheck(lambda q: kq.Form(q, q.clone()).distance(x, y), (query,))
    by_copy, by_itself = (
        torch.autograd.grad(kq.Form(query, key).distance(x, y).sum(), query)[0] for key in (query.clone(), query)
    )
    torch.testing.assert_close(by_copy, by_itself)


def test_gradients_do_not_depend_on_the_size_of_the_factors():
    query, key = random_pair()
    expected = torch.autograd.grad(kq.Form(query, key).symmetry, query)[0]
    for size in (2.0**-300, 2.0**300):
        small = (query * size).detach().requires_grad_()
        slope = torch.autograd.grad(kq.Form(small, key / size).symmetry, small)[0]
        torch.testing.assert_close(slope * size, expected)


def test_vectors_without_derivatives_say_so():
    query, key = tied_pair()
    with pytest.raises(RuntimeError, match="planes have no derivatives where"):
        kq.Form(query, key).skew_planes().values.sum().backward()
    nothing = torch.zeros(2, 7, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="singular triples have no derivatives where"):
        kq.Form(nothing, key).svd().left.sum().backward()


# torch.func


@pytest.mark.parametrize("number", ["norm2", "symmetry", "trace of S³", "row_norms"])
def test_forward_mode_and_hessians_equal_backward_mode(number):
    query, key = (t.detach() for t in random_pair())

    def of(q):
        return SMOOTH[number](kq.Form(q, key))

    backward = torch.autograd.functional.jacobian(of, query)
    torch.testing.assert_close(jacfwd(of)(query), backward)
    torch.testing.assert_close(jacrev(of)(query), backward)
    twice = torch.autograd.functional.hessian(lambda q: of(q).sum(), query)
    torch.testing.assert_close(hessian(lambda q: of(q).sum())(query), twice)


def test_forward_mode_of_tied_factors():
    query = torch.randn(2, 7, dtype=torch.float64)

    def of(q):
        form = kq.Form(q, q.clone())
        return torch.stack((form.norm2, form.nearest("psd").norm2, form.eigh(1).values.sum()))

    torch.testing.assert_close(jacfwd(of)(query), torch.autograd.functional.jacobian(of, query))


@pytest.mark.parametrize("twice", [hessian, lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacfwd(f))])
def test_second_derivatives_by_torch_func_are_refused_rather_than_wrong(twice):
    query = torch.randn(2, 7, dtype=torch.float64)
    for of in (lambda q: kq.Form(q, q.clone()).norm2, lambda q: kq.Form(q, q.flip(0)).nearest("psd").norm2):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            twice(of)(query)


@pytest.mark.unchecked
def test_vmap_is_refused_in_one_sentence():
    factors = torch.randn(3, 2, 7)
    with pytest.raises(RuntimeError, match="query is batched by vmap, which Form does not support: use leading dim"):
        vmap(lambda q: kq.Form(q, q).norm2)(factors)
