"""HeadReranker: against attention maps taken from the layers themselves, and the choice of heads."""

import pickle

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.listening.inputs.load import load_model

PASSAGES = ["A ship on the sea.", "A house in the town.", "The old man was asleep."]


@pytest.fixture(scope="module")
def reranker():
    return kq.HeadReranker(kq.models.DECODER, heads=3, device="cpu")


def expected(query):
    """Attention of the query's tokens to the tokens of each passage, by the maps of every layer."""
    model, tokenizer = load_model(kq.models.DECODER)
    model = model.float().eval()
    parts = [f"[{number}] {text}\n" for number, text in enumerate(PASSAGES, 1)] + ["Query: ", query]
    tokens = [tokenizer(part)["input_ids"] for part in parts]
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in tokens])
    inputs = []
    layers = [module for module in model.modules() if isinstance(module, kq.Attention)]
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in layers]
    with torch.no_grad():
        model(torch.tensor([[token for part in tokens for token in part]]))
        maps = [layer.maps(x, is_causal=True)[0].double().numpy() for layer, x in zip(layers, inputs, strict=True)]
    for hook in hooks:
        hook.remove()
    rows = [head[owner == len(parts) - 1].mean(0) for layer in maps for head in layer]
    sums = [[row[owner == place].sum() for place in range(len(PASSAGES))] for row in rows]
    return np.array(sums).reshape(len(layers), -1, len(PASSAGES))


def test_scores_are_attention_minus_that_of_a_query_without_content(reranker):
    scores = reranker.head_scores("the sea", PASSAGES)
    assert np.allclose(scores, expected("the sea") - expected("N/A"), atol=1e-5)
    plain = kq.HeadReranker(kq.models.DECODER, calibrate=False, device="cpu").head_scores("the sea", PASSAGES)
    assert np.allclose(plain, expected("the sea"), atol=1e-5)
    assert not np.any(reranker.head_scores("N/A", PASSAGES))
    order, values = reranker.rerank("the sea", PASSAGES)
    assert np.allclose(values, scores.mean((0, 1))[order])
    assert (np.diff(values) <= 0).all()


def test_a_live_model_stays_as_it_is():
    model, tokenizer = load_model(kq.models.DECODER)
    dtype = next(model.train().parameters()).dtype
    scores = kq.HeadReranker(model, tokenizer, calibrate=False).head_scores("the sea", PASSAGES)
    assert np.allclose(scores, expected("the sea"), atol=1e-3)
    assert model.training
    assert next(model.parameters()).dtype == dtype


def test_the_heads_that_separate_best_are_chosen(reranker, monkeypatch):
    scores = np.zeros((2, 2, 3))
    scores[1, 0] = [0.1, 0.7, 0.1]  # sees the relevant one
    scores[0, 1] = [0.5, 0.4, 0.0]
    scores[0, 0] = [0.9, 0.0, 0.9]
    model = kq.HeadReranker("none", heads=2)
    monkeypatch.setattr(model, "head_scores", lambda query, passages: scores)
    model.fit(["a"], [PASSAGES], [[1]])
    assert np.allclose(model.separation_, [[-0.9, 0.15], [0.6, 0.0]])
    assert model.chosen_ == [(1, 0), (0, 1)]
    order, values = model.rerank("a", PASSAGES)
    assert order.tolist() == [1, 0, 2]
    assert np.allclose(values, [0.55, 0.3, 0.05])


def test_bad_input_is_refused(reranker):
    for query, passages, message in (
        ("", PASSAGES, "query must be a text that is not empty"),
        ("a", [], "at least one text"),
        ("a", "text", "at least one text"),
        ("a", [1], "at least one text"),
    ):
        with pytest.raises(ValueError, match=message):
            reranker.rerank(query, passages)
    with pytest.raises(ValueError, match="of one length, at least 1, got 1, 0 and 1"):
        reranker.fit(["a"], [], [[0]])
    with pytest.raises(ValueError, match="query 0 must have relevant passages and others, got 3 relevant"):
        reranker.fit(["a"], [PASSAGES], [[0, 1, 2]])
    with pytest.raises(ValueError, match="has no tokenizer"):
        kq.HeadReranker(torch.nn.Linear(2, 2), device="cpu").rerank("a", PASSAGES)


def test_a_pickle_reads_the_model_again(reranker):
    before = reranker.rerank("the sea", PASSAGES)[1]
    data = pickle.dumps(reranker)
    assert len(data) < 10_000
    assert np.array_equal(pickle.loads(data).rerank("the sea", PASSAGES)[1], before)
