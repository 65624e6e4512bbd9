"""Shares of variance: on data against explicit sums over tokens and offsets, in closed form against a million pairs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.forms.rope import energies
from keyquery.forms.shares import Visible, part_ranks, shares

NAMES = PARTS
ROPES = {
    "none": None,
    "half": kq.Rope(4, base=50.0),
    "interleaved": kq.Rope(4, base=50.0, interleaved=True),
    "partial, with a factor": kq.Rope(2, base=50.0, factor=1.3),
}


def moments(n=7, rank=4, heads=2):
    """Queries and keys of n tokens, with means, and their exact mean and covariance."""
    joint = torch.randn(heads, n, 2 * rank, dtype=torch.float64) + torch.randn(heads, 1, 2 * rank, dtype=torch.float64)
    mean = joint.mean(1)
    centred = joint - mean.unsqueeze(1)
    return joint, mean, centred.mT @ centred / n


def split_by_hand(joint, mean, rope, visible, scale, bias):
    """Every pair of tokens at every pair of places: the five parts as defined, then their variances."""
    heads, _, width = joint.shape
    rank = width // 2
    turn = (lambda t, place: t) if rope is None else (lambda t, place: rope.rotate(t, float(place)))
    parts = torch.zeros(heads, 5, dtype=torch.float64)
    pairs = 0
    for i in range(visible.length):
        seen = [j for j in range(visible.length) if j - i in visible.offsets().tolist()]
        rows = []
        for j in seen:
            q, k = joint[..., :rank], joint[..., rank:]
            mq, mk = mean[:, None, :rank], mean[:, None, rank:]
            there = turn(q - mq, i) @ turn(k - mk, j).mT  # (heads, token at i, token at j)
            back = (turn(q - mq, i) @ turn(k - mk, j).mT).mT  # the token at j with its content at i, and so on
            crowd = (turn(mq, i) @ turn(k - mk, j).mT).expand_as(there)
            alone = (turn(q - mq, i) @ turn(mk, j).mT).expand_as(there)
            place = (turn(mq, i) @ turn(mk, j).mT).expand_as(there)
            if bias is not None:
                place = place + bias[:, visible.offsets().tolist().index(j - i), None, None] / scale
            rows.append(torch.stack(((there + back) / 2, (there - back) / 2, crowd, alone, place), dim=1))
        scores = torch.stack(rows)  # (keys seen, heads, parts, token at i, token at j)
        # Tokens at the places seen are independent, so a content term's own mean leaves 1 − 1/m of its variance; the
        # last two do not depend on the token at j, and their mean over places is taken out exactly.
        content = scores[:, :, :3].square().mean((-2, -1)).sum(0) * (1 - 1 / len(seen))
        where = scores[:, :, 3:, :, 0]
        spread = (where - where.mean(0)).square().mean(-1).sum(0)
        parts += torch.cat((content, spread), dim=1)
        pairs += len(seen)
    parts = parts / pairs
    return parts / parts.sum(1, keepdim=True)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_shares_are_those_of_the_scores(rope, causal, biased):
    joint, mean, covariance = moments()
    visible = Visible(6, causal, window=4 if biased else None)
    bias = torch.randn(2, len(visible.offsets()), dtype=torch.float64) if biased else None
    given = shares(mean, covariance, 0.5, visible, ROPES[rope], bias)
    expected = split_by_hand(joint, mean, ROPES[rope], visible, 0.5, bias)
    torch.testing.assert_close(torch.stack([given[name] for name in NAMES], 1), expected)


def test_without_positions_they_are_the_shares_of_the_form():
    form = kq.Form(*torch.randn(2, 3, 4, 20, dtype=torch.float64))
    x, bias = torch.randn(60, 20, dtype=torch.float64) + 1, torch.randn(3, 4, dtype=torch.float64)
    q, k = x @ form.query.mT + bias.unsqueeze(1), x @ form.key.mT
    joint = torch.cat((q, k), -1)
    centred = joint - joint.mean(1, keepdim=True)
    given = shares(joint.mean(1), centred.mT @ centred / len(x), 1.0, Visible(8, False))
    expected = form.shares(torch.cov(x.mT, correction=0), x.mean(0), bias)
    torch.testing.assert_close(torch.stack([given[name] for name in NAMES[:3]]), torch.stack(expected))
    assert not given["position"].any()


@pytest.mark.parametrize("rope", ["half", "interleaved", "partial, with a factor"])
@given(offset=st.integers(-20, 20), seed=st.integers(0, 100))
def test_energies_at_an_offset_are_those_of_the_form_there(rope, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    form = kq.Form(*torch.randn(2, 2, 4, 20, dtype=torch.float64, generator=generator))
    at = energies(form.gram(), ROPES[rope], torch.tensor([float(offset)]))
    there, back = form.at(offset, ROPES[rope]), form.at(-offset, ROPES[rope])
    torch.testing.assert_close(at.there[0], there.norm2)
    torch.testing.assert_close(at.contents_symmetry()[0], there.symmetry)
    plus, minus = (there + back.mT) / 2, (there - back.mT) / 2
    expected = (plus.norm2 - minus.norm2) / (plus.norm2 + minus.norm2)
    torch.testing.assert_close(at.exchange_symmetry()[0], expected)


def test_ranks_of_the_parts():
    query = torch.zeros(1, 2, 4, dtype=torch.float64)
    query[0, 0, 0] = query[0, 1, 1] = 1
    alike, points = part_ranks(kq.Form(query, query).gram())
    torch.testing.assert_close(alike, torch.tensor([2.0], dtype=torch.float64))
    assert float(points) == 0


# Shares of a form on data, in closed form


def test_a_rank_one_sink_is_all_popularity():
    direction = torch.eye(8)[:1]
    form = kq.Form(1e-6 * direction, direction)
    shares = form.shares(torch.eye(8), mean=1e6 * torch.ones(8))
    assert float(shares.popularity) > 0.999
