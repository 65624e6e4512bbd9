"""Causes out of attention: known models, degenerate rows, and attention of every origin."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keyquery as kq
from keyquery.layers import LanguageModel
from keyquery.learn.causes.causes import Causes
from keyquery.learn.causes.masked_prediction import predicted
from keyquery.learn.discovery.search import search
from keyquery.listening import attention_maps
from keyquery.listening.inputs.word_pieces import words_of
from keyquery.proof.families import tiny_model
from tests.learn.discovery.sems import DSeparation, random_sem

TEXT = "It was unbelievably cold, and the captain of the ship spoke."


@cache
def shipped(folder):
    from keyquery.checkpoints.tokenizer import Tokenizer

    return LanguageModel.load(folder), Tokenizer.load(folder)


def test_known_graphs_by_positions_of_the_whole_attention():
    # The exact graph of what is observed; its edges name positions among all tokens.
    rng = np.random.default_rng(0)
    for _ in range(10):
        sem = random_sem(rng)
        truth = search(DSeparation(sem.graph, sem.observed)).graph
        reading = kq.causes(torch.tensor(sem.attention), nodes=sem.observed, alpha=1e-3, samples=1e10, causal=False)
        assert reading.edges == [(sem.observed[i], sem.observed[j], a, b) for i, j, a, b in truth.edges()]
        assert reading.nodes == sem.observed
        assert reading.tests == sum(reading.graphs[0]["tests_by_size"])
        fci = kq.causes(torch.tensor(sem.attention), sem.observed, 1e-3, 1e10, "fci", causal=False)
        assert fci.edges == reading.edges


def test_a_chain_by_hand():
    # X₂ = X₁ + U₂ with X₁ = X₀ + U₁: neighbours depend, the ends do not given the middle, and no arrow is known.
    solved = np.linalg.inv(np.eye(3) - np.diag([0.8, 0.8], -1))
    attention = solved / solved.sum(1, keepdims=True)
    reading = kq.causes(attention, causal=False)
    assert reading.edges == [(0, 1, "circle", "circle"), (1, 2, "circle", "circle")]
    # With the order 0 *→ 1 and 1 *→ 2 are known, and 1, which is no collider, is a cause of 2.
    assert kq.causes(attention).edges == [(0, 1, "circle", "arrow"), (1, 2, "tail", "arrow")]
    assert (reading.samples, reading.provenance["samples"]) == (768, "768, as published")


@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_uniform_attention_joins_all_and_tells_nothing(tokens):
    # Equal rows cannot be told apart, and no set of others says anything about any: every pair stays, with circles.
    reading = kq.causes(torch.full((tokens, tokens), 1 / tokens))
    assert len(reading.edges) == tokens * (tokens - 1) // 2
    assert {mark for edge in reading.edges for mark in edge[2:]} <= {"circle"}


@pytest.mark.parametrize("method", ["icd", "fci"])
@settings(max_examples=20)
@given(seed=st.integers(0, 40))
def test_duplicated_and_nearly_singular_rows_give_a_graph(method, seed):
    rng = np.random.default_rng(seed)
    attention = rng.dirichlet(np.full(9, 0.2), size=9)
    attention[rng.integers(9)] = attention[rng.integers(9)]
    attention[4] = 0.5 * attention[2] + 0.5 * attention[3]
    attention[8] = attention[7] * (1 - 1e-9) + 1e-9 / 9
    reading = kq.causes(torch.tensor(attention), method=method)
    pairs = {edge[:2] for edge in reading.edges}
    assert (7, 8) in pairs  # all but the same row
    assert all(mark in ("tail", "arrow", "circle") for edge in reading.edges for mark in edge[2:])


def test_heads_and_their_consensus():
    one = torch.tensor([[1, 0, 0], [0, 1, 0], [0.3, 0.3, 0.4]])  # 0 o→ 2 ←o 1
    other = torch.tensor([[1, 0, 0], [0, 1, 0], [0.0, 0.5, 0.5]])  # 1 o–o 2
    reading = kq.causes(torch.stack((one, one, other, torch.eye(3))), causal=False)
    assert [len(graph["edges"]) for graph in reading.graphs] == [2, 2, 1, 0]
    rows = {(row["i"], row["j"]): row for row in reading.agreement()}
    assert {pair: row["heads"] for pair, row in rows.items()} == {(0, 2): 2, (1, 2): 3}
    assert rows[1, 2]["marks_j"] == {"arrow": 2, "circle": 1}
    assert reading.edges == [(0, 2, "circle", "arrow"), (1, 2, "circle", "arrow")]
    assert [row["heads"] for row in reading.consensus()] == [2, 3]
    assert reading.tests == sum(graph["tests"] for graph in reading.graphs)
    assert kq.causes(torch.stack((one, other)), head=1, causal=False).edges == [(1, 2, "circle", "circle")]
    assert reading.pag(2).edges() == [(1, 2, "circle", "circle")]
    assert [(row["token_i"], row["mark_j"]) for row in reading.records()[-1:]] == [("1", "circle")]


def test_half_of_the_heads_that_disagree_on_a_mark_leave_a_circle():
    graph = {"layer": 0, "tests": 1, "tests_by_size": [1], "rounds": 1, "done": True}
    graphs = [{**graph, "head": h, "edges": [[0, 1, m, "arrow"]]} for h, m in enumerate(["tail", "arrow"])]
    settings = {"method": "icd", "alpha": 0.01, "samples": 768.0}
    reading = Causes(model={"name": "two"}, tokens=["a", "b"], nodes=[0, 1], graphs=graphs, **settings)
    assert reading.edges == [(0, 1, "circle", "arrow")]


def test_nodes_by_number_are_those_that_receive_most():
    attention = torch.tensor([[0.5, 0, 0.5], [0, 0.2, 0.8], [0.1, 0, 0.9]])
    assert kq.causes(attention, nodes=2).nodes == [0, 2]
    assert kq.causes(attention, nodes=[2, 1]).nodes == [1, 2]


def test_a_layer_and_its_maps_give_the_same_graph():
    torch.manual_seed(0)
    layer, x = kq.Attention(16, 2), 3 * torch.randn(1, 6, 16)
    reading = kq.causes(layer, inputs={"x": x})
    assert (reading.samples, reading.provenance["samples"]) == (16, "hidden size")
    assert kq.causes(layer.maps(x)[0], samples=16).edges == reading.edges


@pytest.mark.parametrize("folder", [kq.models.ENCODER, kq.models.DECODER])
def test_a_shipped_model_on_a_text(folder):
    model, tokenizer = shipped(folder)
    reading = kq.causes(folder, text=TEXT)
    assert " ".join(reading.tokens) == "It was unbelievably cold , and the captain of the ship spoke ."
    assert [graph["layer"] for graph in reading.graphs] == [3] * 4
    assert reading.samples == 128
    words = words_of(TEXT, tokenizer)
    assert len(words.ids) > len(words.texts)
    maps = attention_maps(model, words.batch())
    assert len(maps) == 4
    by_hand = words.merged(maps[1][0].double())[2]
    assert torch.allclose(by_hand.sum(-1), torch.ones((), dtype=torch.float64), atol=1e-5)
    chosen = kq.causes(model, text=TEXT, tokenizer=tokenizer, layer=1, head=2)
    assert chosen.edges == kq.causes(by_hand, samples=128).edges
    assert chosen.graphs[0]["layer"] == 1


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_transformers_model_gives_its_deepest_layer_and_is_put_back(name):
    model = tiny_model(name)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(3, 60, (1, 9))
    reading = kq.causes(model, inputs={"input_ids": ids}, samples=200)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(ids, output_attentions=True).attentions
    assert reading.graphs[0]["layer"] == len(maps) - 1
    assert reading.edges == kq.causes(maps[-1], samples=200).edges
    assert reading.model["heads"] == maps[-1].shape[1]


@pytest.mark.parametrize("folder", [kq.models.ENCODER, kq.models.DECODER])
def test_predictions_change_when_what_they_rest_on_is_masked(folder):
    # By hand: mask tokens for the encoder, a text without them for the decoder, of single words and of pairs.
    model, tokenizer = shipped(folder)
    words = words_of("He looked at her and said that he was very sorry.", tokenizer)
    found = predicted(model, tokenizer, words, 6)
    places = words.places[6]
    assert len(places) == 1

    def by_hand(*masked):
        ids = torch.tensor([words.ids])
        hidden = [place for word in masked for place in words.places[word]]
        if folder == kq.models.DECODER:
            kept = [place for place in range(places[0]) if place not in hidden]
            return model(ids[:, kept])[0, -1:].argmax(-1).tolist()
        ids[0, hidden + places] = tokenizer.mask_token_id
        return model(ids)[0, places].argmax(-1).tolist()

    assert [found.words.ids[place] for place in places] == by_hand()
    assert found((), 6) is False  # with nothing masked it stays
    sets = [(word,) for word in range(12) if word != 6] + [(3, 5), (4, 5), (2, 5)]
    changed = [one for one in sets if by_hand(*one) != by_hand()]
    assert [one for one in sets if found(one, 6)] == changed
    assert 0 < len(changed) < len(sets)
    if folder == kq.models.DECODER:
        assert found((7, 8, 9), 6) is False  # what comes later reaches nothing


def definite(reading):
    """Edges → of all heads: where from, where to."""
    found = []
    for index in range(len(reading.graphs)):
        for i, j, at_i, at_j in reading.edges_of(index):
            if {at_i, at_j} == {"tail", "arrow"}:
                found.append((i, j) if at_i == "tail" else (j, i))
    return found


def test_no_word_of_a_decoder_is_a_cause_of_an_earlier_one():
    reading = kq.causes(kq.models.DECODER, text=TEXT)
    assert reading.causal
    assert len(definite(reading)) > 5
    assert all(source < target for source, target in definite(reading))
    assert all(at_j == "arrow" for index in range(len(reading.graphs)) for *_, at_j in reading.edges_of(index))
    ignored = kq.causes(kq.models.DECODER, text=TEXT, causal=False)
    assert not ignored.causal
    assert any(source > target for source, target in definite(ignored))
    assert kq.causes(kq.models.ENCODER, text=TEXT, head=0).causal is False
    assert kq.Reading.load(reading.to_json()) == reading


def test_an_order_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="causal=True, but the attention looks ahead"):
        kq.causes(torch.tensor([[1, 0, 0], [0, 0.5, 0.5], [0.3, 0.3, 0.4]]), causal=True)
    assert kq.causes(torch.eye(3), selection=True).causal is False


def test_rounds_of_every_head_are_watched():
    seen = []

    def watch(items, what, total):
        seen.append(what)
        return items

    kq.causes(torch.rand(2, 5, 5).softmax(-1), progress=watch)
    assert seen[0] == "head 0, sets of 0 tokens"
    assert "head 1, sets of 1 token" in seen
    kq.causes(torch.rand(5, 5).softmax(-1), progress=watch)
    assert seen[-1].startswith("sets of ")
