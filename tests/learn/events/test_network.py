"""The network of events: a mixture of log-normals against torch and integrals, and what a prediction may see."""

import numpy as np
import pytest
import torch
from scipy import integrate
from torch.distributions import Categorical, LogNormal, MixtureSameFamily

from keyquery.learn.events.network import KNOTS, EventNetwork, Mixture, Since


@pytest.fixture
def mixture():
    return Mixture(*torch.randn(2, 5, 3).double(), torch.rand(5, 3).double() + 0.2, 0.01)


def reference(mixture):
    return MixtureSameFamily(Categorical(logits=mixture.weights), LogNormal(mixture.mean, mixture.spread))


def test_gaps_have_the_likelihood_of_a_mixture(mixture):
    expected = reference(mixture)
    gaps = torch.tensor([0.02, 0.5, 1.0, 7.0, 300.0]).double()
    assert torch.allclose(mixture.log_density(gaps), expected.log_prob(gaps), atol=1e-9)
    below = expected.cdf(torch.full((5,), 0.01).double()).log()
    for tiny in (0.0, 0.004, 0.01):  # at the floor and below it only the probability of being there counts
        assert torch.allclose(mixture.log_density(torch.full((5,), tiny).double()), below, rtol=1e-4)


def test_gaps_given_silence_against_integrals(mixture):
    mixture = mixture._replace(floor=1e-6)
    expected, after = reference(mixture), torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0]).double()
    left = 1 - expected.cdf(after)
    assert torch.allclose(mixture.log_survival(after).exp(), left, atol=1e-9)
    for share in (0.1, 0.5, 0.9):
        quantile, conditional = mixture.quantile(share), mixture.quantile(share, after)
        wanted = torch.full((5,), share).double()
        assert torch.allclose(expected.cdf(quantile), wanted, atol=1e-6)
        assert torch.allclose((expected.cdf(conditional) - expected.cdf(after)) / left, wanted, atol=1e-6)
    means = mixture.average(after)
    for row in range(5):
        one = Mixture(*(part[row] for part in mixture[:3]), 1e-6)
        beyond = integrate.quad(
            lambda gap, one=one: float(one.log_survival(torch.tensor(gap)).exp()), after[row], np.inf
        )
        assert float(means[row]) == pytest.approx(float(after[row]) + beyond[0] / float(left[row]), rel=1e-4)
    assert torch.allclose(mixture.average(torch.zeros(5).double()), expected.mean, rtol=1e-5)
    far = mixture.quantile(0.5, torch.full((5,), 1e6).double())  # where the survival underflows
    assert bool(((far > 1e6) & far.isfinite()).all())


def test_gaps_that_are_drawn_have_it_too(mixture):
    many = Mixture(*(part[:1].expand(20_000, -1) for part in mixture[:3]), 0.3)
    drawn = many.draw(torch.Generator().manual_seed(0)).double()
    expected = reference(Mixture(*(part[0] for part in mixture[:3]), 0.3))
    for gap in (0.3, 0.6, 1.0, 3.0):
        assert float((drawn <= gap).double().mean()) == pytest.approx(float(expected.cdf(torch.tensor(gap))), abs=0.015)
    assert not ((drawn > 0) & (drawn <= 0.3)).any()  # at the floor is at the same time


def test_a_gap_is_seen_through_lines_between_quantiles():
    gaps = np.random.default_rng(0).lognormal(0, 3, 2000) * (np.arange(2000) % 4 > 0)  # a quarter at one time
    since, spans = Since(3, floor=1e-4), np.array([0.0, 1e-9, 0.01, 1.0, 30.0, 1e9])
    since.begin(gaps)
    vectors = since(torch.from_numpy(spans).unsqueeze(0))[0].detach().numpy()
    knots = since.knots.double().numpy()
    assert (np.diff(knots) > 0).all()
    assert np.exp(knots[len(knots) // 2]) == pytest.approx(np.median(gaps), rel=0.15)
    heights = np.concatenate((np.zeros((3, 1)), since.map.weight.detach().double().cumsum(1).numpy()), 1)
    heights += since.map.bias.detach().double().numpy()[:, None]
    assert heights.shape == (3, KNOTS)
    for row, height in zip(vectors.T, heights, strict=True):
        assert np.allclose(row, np.interp(np.log(np.maximum(spans, 1e-4)), knots, height), atol=1e-5)


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("how", ["concatenated", "additive", "interaction"])
def test_nothing_that_comes_later_and_no_padding_reaches_a_prediction(how, targeted):
    network = EventNetwork(4, 16, 2, 2, "mercer", how, targeted=targeted).eval()
    types, times = torch.randint(0, 4, (3, 9)), torch.rand(3, 9).double().cumsum(1)
    following, real = times + torch.rand(3, 9).double(), torch.ones(3, 9, dtype=torch.bool)
    logits, gaps = network(types, times, real, following)
    other, later, after = types.clone(), times.clone(), following.clone()
    other[:, 5:], later[:, 5:] = 3 - other[:, 5:], later[:, 5:] + 1.7
    after[:, 4:] += 2.9  # the time of the target of event 4, and those after it
    new_logits, new_gaps = network(other, later, real, after)
    sees = 4 if targeted else 5  # with target_time, only the type of the event at that time does
    assert torch.equal(new_logits[:, :sees], logits[:, :sees])
    assert torch.equal(new_logits[:, 4], logits[:, 4]) is not targeted
    assert not torch.equal(new_logits[:, 5], logits[:, 5])
    for new, old in zip(new_gaps[:3], gaps[:3], strict=True):  # of the gap it is never seen
        assert torch.equal(new[:, :5], old[:, :5])
    real[:, 5:] = False
    masked = network(other, times.where(real, 1e6), real, following)[0]
    assert torch.allclose(masked[:, :5], logits[:, :5], atol=1e-6)
