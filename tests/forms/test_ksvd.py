"""Asymmetric kernel SVD against torch.linalg.svd of the small dense K."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq


@st.composite
def features(draw):
    """Φ_q (n, p) and Φ_k (m, p); wide, tall and of deficient rank."""
    n, m, p = (draw(st.integers(1, 12)) for _ in range(3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    phi_query = torch.randn(n, p, dtype=torch.float64, generator=generator)
    phi_key = torch.randn(m, p, dtype=torch.float64, generator=generator)
    if draw(st.booleans()):
        phi_key[:, p // 2 :] = 0
    return phi_query, phi_key


@given(pair=features(), data=st.data())
def test_triples_are_those_of_the_dense_kernel(pair, data):
    phi_query, phi_key = pair
    rank = data.draw(st.integers(1, min(*phi_query.shape, len(phi_key))))
    K = phi_query @ phi_key.mT
    solution = kq.ksvd(phi_query, phi_key, rank)
    size = K.norm() + 1e-30
    expected = torch.linalg.svdvals(K)
    assert (solution.values - expected[:rank]).abs().max() <= 1e-10 * size
    assert (K @ solution.right - solution.left * solution.values).abs().max() <= 1e-10 * size
    assert (K.mT @ solution.left - solution.right * solution.values).abs().max() <= 1e-10 * size
    for vectors in (solution.left, solution.right):
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(rank, dtype=torch.float64))
    error = (K - solution.left * solution.values @ solution.right.mT).norm()
    assert abs(error - expected[rank:].norm()) <= 1e-10 * size


@given(pair=features(), data=st.data())
def test_the_solution_is_stationary_and_its_objective_zero(pair, data):
    phi_query, phi_key = pair
    rank = data.draw(st.integers(1, min(*phi_query.shape, len(phi_key))))
    solution = kq.ksvd(phi_query, phi_key, rank)
    size = (phi_query @ phi_key.mT).norm()
    assert abs(solution.objective()) <= 1e-9 * size
    present = solution.values[solution.values > 1e-12 * solution.values.max()]
    condition = float(present.max() / present.min()) if len(present) else 1.0
    assert solution.residual() <= 1e-9 * max(1.0, condition / 1e6)


def test_objective_and_residual_by_autograd():
    solution = kq.ksvd(*torch.randn(2, 9, 5, dtype=torch.float64), rank=3)
    we, wr = torch.randn(2, 5, 3, dtype=torch.float64).requires_grad_()
    inverse = torch.diag(1 / solution.values)
    e, r = solution.phi_query @ we, solution.phi_key @ wr
    J = (e @ inverse @ e.mT).trace() / 2 + (r @ inverse @ r.mT).trace() / 2 - (we.mT @ wr).trace()
    torch.testing.assert_close(solution.objective(we, wr), J)
    slopes = torch.autograd.grad(J, (we, wr))
    expected = torch.cat(slopes).norm() / torch.cat((we, wr)).norm()
    torch.testing.assert_close(solution.residual(we, wr), expected)


def test_extend_agrees_at_the_old_points_and_with_a_larger_kernel():
    phi_query, phi_key = torch.randn(2, 20, 5, dtype=torch.float64)
    solution = kq.ksvd(phi_query, phi_key, rank=5)
    we, wr = solution.primal()
    torch.testing.assert_close(phi_query @ we, solution.left * solution.values)
    torch.testing.assert_close(phi_key @ wr, solution.right * solution.values)
    old = solution.extend(phi_query, phi_key)
    torch.testing.assert_close(old.left, solution.left)
    torch.testing.assert_close(old.right, solution.right)
    new = torch.randn(3, 5, dtype=torch.float64)
    extended = solution.extend(phi_query=new)
    assert extended.right is None
    reconstructed = extended.left * solution.values @ solution.right.mT
    torch.testing.assert_close(reconstructed, new @ phi_key.mT)


def test_nystrom_of_a_lower_rank_inverts_the_leading_triples_of_the_sample():
    phi_query, phi_key = torch.randn(40, 4, dtype=torch.float64), torch.randn(30, 4, dtype=torch.float64)
    sampled = kq.nystrom(phi_query, phi_key, rank=3, samples=10)
    rows, columns = (torch.linspace(0, n - 1, 10).long() for n in (40, 30))
    K = phi_query @ phi_key.mT
    u, s, vh = torch.linalg.svd(K[rows][:, columns])
    expected = K[:, columns] @ (vh[:3].mT / s[:3]) @ u[:, :3].mT @ K[rows]
    torch.testing.assert_close(sampled.left * sampled.values @ sampled.right.mT, expected)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: kq.ksvd(a, a, 0), "rank must be between 1 and 4, got 0"),
        (lambda a: kq.nystrom(a, a, 3, samples=2), "rank must be between 1 and 2, got 3"),
        (lambda a: kq.ksvd(a, a, 2).objective(a), "we must have shape (p, s) with p = 4, s = 2, got (9, 4)"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as caught:
        call(torch.randn(9, 4))
    assert str(caught.value) == words
