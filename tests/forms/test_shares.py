"""Shares of a form on data, in closed form, against explicit sums over pairs of tokens."""

import torch

import keyquery as kq


def test_shares_are_those_of_all_pairs_of_tokens():
    form = kq.Form(*torch.randn(2, 3, 4, 20, dtype=torch.float64))
    x, bias = torch.randn(60, 20, dtype=torch.float64) + 1, torch.randn(3, 4, dtype=torch.float64)
    mean = x.mean(0)
    content = (x - mean) @ form.dense() @ (x - mean).mT  # every token with every token
    pull = (mean @ form.query.mT + bias).unsqueeze(-2) @ (form.key @ (x - mean).mT)
    parts = ((content + content.mT) / 2, (content - content.mT) / 2, pull.expand_as(content))
    expected = torch.stack([part.square().mean((-2, -1)) for part in parts])
    shares = form.shares(torch.cov(x.mT, correction=0), mean, bias)
    torch.testing.assert_close(torch.stack(shares), expected / expected.sum(0))


def test_a_rank_one_sink_is_all_popularity():
    direction = torch.eye(8)[:1]
    form = kq.Form(1e-6 * direction, direction)
    shares = form.shares(torch.eye(8), mean=1e6 * torch.ones(8))
    assert float(shares.popularity) > 0.999
