"""A layer whose weights are counts attends as counting does, learns if it may, and is an Attention otherwise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.learn.cooccurrence.counts import normed_rows


def counts(seed=0, n=6):
    return kq.Cooccurrence(torch.randint(1, 30, (n, n), generator=torch.Generator().manual_seed(seed)))


@given(st.integers(0, 100), st.integers(2, 7), st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_one_whole_head_attends_as_normed_counts(seed, n, words):
    x = counts(seed, n)
    layer = kq.CooccurrenceAttention(x, smooth=1e-12, dtype=torch.float64)
    tokens = torch.tensor(words) % n
    expected = x.project(tokens)
    shares = torch.tensor(expected.norm, dtype=torch.float64)
    assert layer.maps(tokens[None])[0, 0].allclose(shares, rtol=1e-10)
    gathered = x.dense()[tokens]
    assert layer(tokens[None])[0].allclose(shares @ gathered, rtol=1e-9)


def test_smoothing_adds_to_every_count():
    x = kq.Cooccurrence(torch.tensor([[0, 3, 0], [1, 0, 2], [0, 5, 0]]))
    layer = kq.CooccurrenceAttention(x, smooth=0.5, dtype=torch.float64)
    words = torch.tensor([[0, 1, 2]])
    assert layer.maps(words)[0, 0].allclose(normed_rows(x.dense() + 0.5), rtol=1e-10)


def test_causal_and_padded_sequences_share_among_what_is_seen():
    x = counts()
    layer = kq.CooccurrenceAttention(x, smooth=1e-12, dtype=torch.float64)
    words = torch.tensor([[4, 1, 3, 0]])
    m = x.dense()[words[0]][:, words[0]]
    assert layer.maps(words, is_causal=True)[0, 0].allclose(normed_rows(m.tril()), rtol=1e-9)
    mask = torch.tensor([[True, True, False, True]])
    seen = normed_rows(m * mask[0])
    assert layer.maps(words, mask)[0, 0][mask[0]].allclose(seen[mask[0]], rtol=1e-9)


def test_its_form_is_that_of_the_counts():
    x = counts()
    layer = kq.CooccurrenceAttention(x, heads=2, rank=3, dtype=torch.float64)
    form = layer.form() * layer.scale
    assert form.dense().sum(0).allclose(x.dense("log"), atol=1e-9)
    assert layer.output_form().dense().sum(0).mT.allclose(x.dense(), atol=1e-8)
    assert len(kq.look(layer).heads) == 2


def test_vectors_and_positions_go_in_as_well():
    layer = kq.CooccurrenceAttention(counts(), heads=2, rank=2)
    words = torch.tensor([[0, 5, 2]])
    q = layer.select(words)
    assert q.equal(torch.eye(6)[words])
    assert layer(words).equal(layer(q))
    p = torch.randn(3, 6)
    assert layer.select(words, p).equal(q + p)
    assert not layer(layer.select(words, p)).allclose(layer(words))


def test_weights_learn_unless_they_are_frozen():
    x, words = counts(), torch.tensor([[0, 5, 2]])
    layer = kq.CooccurrenceAttention(x, heads=2, rank=2)
    layer(words).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in layer.parameters())
    assert not any(weight.requires_grad for weight in kq.CooccurrenceAttention(x, frozen=True).parameters())


BAD = {
    "counts": (lambda: kq.CooccurrenceAttention(torch.ones(2, 2)), "cooc must be a kq.Cooccurrence, got Tensor"),
    "rank": (lambda: kq.CooccurrenceAttention(counts(), heads=2, rank=4), "rank must be between 1 and 3, got 4"),
    "heads": (lambda: kq.CooccurrenceAttention(counts(), heads=7), "heads must be between 1 and 6, got 7"),
    "kind": (lambda: kq.CooccurrenceAttention(counts(), kind="logs"), "kind must be one of .* did you mean 'log'"),
    "smooth": (lambda: kq.CooccurrenceAttention(counts(), smooth=0), "smooth must be above 0, since log 0"),
    "words": (
        lambda: kq.CooccurrenceAttention(counts())(torch.tensor([[6]])),
        "token ids must be from 0 to 5, .* got 6",
    ),
    "below": (
        lambda: kq.CooccurrenceAttention(counts())(torch.tensor([[-1]])),
        "token ids must be from 0 to 5, .* got -1",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.unchecked
def test_bad_input_is_told_in_a_sentence(case):
    call, said = BAD[case]
    with pytest.raises((ValueError, TypeError), match=said):
        call()
