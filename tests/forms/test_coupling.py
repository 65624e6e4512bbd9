"""Couplings against brute force, POT and closed forms."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.forms.coupling import gaussian, match, monge_gap

ot = pytest.importorskip("ot")


def least(start, end):
    return (start - end[match(start, end)]).square().sum(-1).mean()


def clouds(n, d, seed=0, offset=0.0):
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, n, d, generator=rng, dtype=torch.float64)
    return drawn[0], 1.5 * drawn[1] + offset


@pytest.mark.parametrize("n", range(1, 7))
def test_the_partners_are_those_of_the_best_of_all_permutations(n):
    start, end = clouds(n, 2, seed=n)
    costs = {
        order: float((start - end[list(order)]).square().sum(-1).mean()) for order in itertools.permutations(range(n))
    }
    best = min(costs, key=costs.get)
    found = match(start, end)
    assert tuple(found.tolist()) == best


@pytest.mark.parametrize(("n", "d", "offset"), [(1, 3, 0), (40, 1, 2), (150, 8, 0), (300, 3, 1e4)])
def test_distances_are_those_of_pot(n, d, offset):
    start, end = clouds(n, d, offset=offset)
    squares = (start[:, None] - end).square().sum(-1).numpy()
    assert float(least(start, end)) == pytest.approx(ot.emd2([], [], squares), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("n", "d"), [(50, 3), (4, 9)])
def test_gaussians_of_clouds_are_those_of_their_moments(n, d):
    start, end = clouds(n, d, offset=1.0)
    means, covariances = zip(
        *((x.mean(0).numpy(), np.cov(x.T, bias=True).reshape(d, d)) for x in (start, end)), strict=True
    )
    if n > d:  # POT takes roots of covariances, which must not be singular
        theirs = ot.gaussian.bures_wasserstein_distance(*means, *covariances)
        assert float(gaussian(start, end)) == pytest.approx(float(theirs), rel=1e-8)
    assert float(gaussian(start, end)) <= float(least(start, end).sqrt())
    stretched = start @ torch.diag(torch.linspace(0.5, 2, d)).double() + 3  # an optimal map: symmetric and positive
    assert float(gaussian(start, stretched)) == pytest.approx(float(least(start, stretched).sqrt()), rel=1e-9)


@given(n=st.integers(1, 9), d=st.integers(1, 3), seed=st.integers(0, 99), epsilon=st.floats(1e-3, 10))
def test_the_loss_lies_between_the_gap_and_epsilon_log_n_more(n, d, seed, epsilon):
    start, end = clouds(n, d, seed, offset=2.0)
    gap = float((start - end).square().sum(-1).mean() - least(start, end))
    found = float(kq.monge_gap(start, end, epsilon, rounds=5000))
    assert gap - 1e-6 <= found <= gap + epsilon * math.log(n) + 1e-6


def test_a_coupling_that_has_not_settled_is_told(monkeypatch):
    with pytest.raises(ValueError, match="epsilon must be positive, got 0"):
        monge_gap(*clouds(2, 1), epsilon=0)
    with pytest.warns(UserWarning, match="Sinkhorn has not converged; use a larger epsilon, or more rounds"):
        monge_gap(*clouds(60, 2), epsilon=1e-6, rounds=1)
    monkeypatch.setitem(sys.modules, "ot.bregman", None)
    with pytest.raises(ImportError, match=r"optimal transport needs POT: pip install 'keyquery\[transport\]'"):
        monge_gap(*clouds(3, 2))


def test_the_loss_is_its_formula_at_the_best_coupling():
    start, end = clouds(5, 2)
    cost = (start[:, None] - end).square().sum(-1)
    plan = torch.from_numpy(ot.sinkhorn([], [], cost.numpy(), 0.5, stopThr=1e-14, numItermax=100_000))
    entropy = -(plan * plan.log()).sum()
    least = (plan * cost).sum() + 0.5 * (math.log(5) - entropy)
    assert float(monge_gap(start, end, 0.5)) == pytest.approx(
        float((start - end).square().sum(-1).mean() - least), abs=1e-7
    )


def test_the_gradient_of_the_loss_is_that_of_finite_differences():
    start, end = (cloud.requires_grad_() for cloud in clouds(4, 2, offset=1.0))
    assert torch.autograd.gradcheck(lambda a, b: monge_gap(a, b, 0.8), (start, end))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"end": torch.zeros(4, 2)}, r"end must have shape \(n, d\) with n = 5, d = 2, got \(4, 2\)"),
        ({"start": torch.full((5, 2), torch.nan)}, "start must be finite, got 10 NaN or infinite of 10 values"),
    ],
)
@pytest.mark.unchecked
def test_clouds_that_cannot_be_coupled(change, words):
    given = {"start": torch.zeros(5, 2), "end": torch.zeros(5, 2), **change}
    for work in (match, monge_gap, gaussian):
        with pytest.raises(ValueError, match=words):
            work(**given)
