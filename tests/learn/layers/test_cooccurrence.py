"""A layer whose weights are counts attends as counting does, learns if it may, and is an Attention otherwise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.learn.cooccurrence.cooccurrence import normed_rows


def counts(seed=0, n=6):
    return kq.Cooccurrence(torch.randint(1, 30, (n, n), generator=torch.Generator().manual_seed(seed)))


@given(
    st.integers(0, 100),
    st.integers(2, 7),
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.sampled_from([1e-12, 0.5]),
)
def test_one_whole_head_attends_as_normed_counts(seed, n, words, smooth):
    x, tokens = counts(seed, n), torch.tensor(words) % n
    layer = kq.CooccurrenceAttention(x, smooth=smooth, dtype=torch.float64)
    shares = normed_rows((x.dense() + smooth)[tokens][:, tokens])
    assert layer.maps(tokens[None])[0, 0].allclose(shares, rtol=1e-10)
    assert layer(tokens[None])[0].allclose(shares @ x.dense()[tokens], rtol=1e-9)


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


def test_vectors_go_in_as_well():
    layer = kq.CooccurrenceAttention(counts(), heads=2, rank=2)
    words = torch.tensor([[0, 5, 2]])
    q = layer.select(words)
    assert q.equal(torch.eye(6)[words])
    assert layer(words).equal(layer(q))
    assert layer.select(q) is q


def test_weights_learn_unless_they_are_frozen():
    x, words = counts(), torch.tensor([[0, 5, 2]])
    layer = kq.CooccurrenceAttention(x, heads=2, rank=2)
    layer(words).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in layer.parameters())
    assert not any(weight.requires_grad for weight in kq.CooccurrenceAttention(x, frozen=True).parameters())


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "words", "complaint"),
    [
        ({"cooc": torch.ones(2, 2)}, [0], "cooc must be a kq.Cooccurrence, got Tensor"),
        ({"heads": 2, "rank": 4}, [0], "rank must be between 1 and 3, got 4"),
        ({"heads": 7}, [0], "heads must be between 1 and 6, got 7"),
        ({"kind": "logs"}, [0], "kind must be one of .* did you mean 'log'"),
        ({"smooth": 0}, [0], "smooth must be above 0, since log 0"),
        ({}, [6], "token ids must be from 0 to 5, .* got 6"),
        ({}, [-1], "token ids must be from 0 to 5, .* got -1"),
    ],
)
def test_bad_input_is_told_in_a_sentence(options, words, complaint):
    with pytest.raises((ValueError, TypeError), match=complaint):
        kq.CooccurrenceAttention(**{"cooc": counts(), **options})(torch.tensor([words]))
