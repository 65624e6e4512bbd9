"""Reciprocal, skew and popularity shares against the scores of a million token pairs."""

import pytest
import torch

import keyquery as kq


def draw(n, mean, root):
    return mean + torch.randn(n, len(mean), dtype=torch.float64) @ root


def monte_carlo(form, mean, root, bias, n=1_000_000):
    """Variance over pairs of each term of the split, from scores alone: exchange the tokens, average over queries."""
    x, y = draw(n, mean, root), draw(n, mean, root)
    query, key = form.query, form.key

    def score(a, b):
        return ((a @ query.mT + bias) * (b @ key.mT)).sum(-1)

    def centred(a, b):
        """The bilinear term alone: a second difference removes whatever depends on one token only."""
        return score(a, b) - score(a, mean + 0 * b) - score(mean + 0 * a, b) + score(mean + 0 * a, mean + 0 * b)

    there, back = centred(x, y), centred(y, x)
    crowd = score(mean + 0 * x, y) - score(mean + 0 * x, mean + 0 * y)
    parts = torch.stack((((there + back) / 2).var(), ((there - back) / 2).var(), crowd.var()))
    return parts / parts.sum()


@pytest.mark.slow
def test_shares_equal_monte_carlo_over_a_million_pairs():
    torch.manual_seed(1)
    dim, rank = 6, 3
    root = torch.randn(dim, dim, dtype=torch.float64) / 2
    mean, bias = 0.3 * torch.randn(dim, dtype=torch.float64), torch.randn(rank, dtype=torch.float64)
    form = kq.Form(*torch.randn(2, rank, dim, dtype=torch.float64))
    shares = torch.stack(form.shares(root.mT @ root, mean, query_bias=bias))
    assert shares.sum() == pytest.approx(1)
    assert shares.min() > 0.05
    torch.testing.assert_close(shares, monte_carlo(form, mean, root, bias), rtol=0, atol=0.01)


def test_without_mean_and_bias_there_is_no_popularity():
    form = kq.Form(*torch.randn(2, 4, 3, 8))
    symmetric, skew, popularity = form.shares(torch.eye(8), torch.zeros(8))
    assert not popularity.any()
    torch.testing.assert_close(symmetric - skew, form.symmetry)


def test_a_rank_one_sink_is_all_popularity():
    direction = torch.eye(8)[:1]
    form = kq.Form(1e-6 * direction, direction)
    shares = form.shares(torch.eye(8), mean=1e6 * torch.ones(8))
    assert float(shares.popularity) > 0.999
