"""What re-rankers say of what they cannot use, in one sentence each."""

import numpy as np
import pytest
import torch

import keyquery as kq
from tests.learn.rerank.groups import curves

pytestmark = pytest.mark.unchecked
VECTORS, LABELS = curves(4, seed=0)
AFFINITY = kq.AffinityReranker(top=8, anchors=4, device="cpu")
HOLED, EMPTY = VECTORS.clone(), VECTORS.clone()
HOLED[5, 2] = float("nan")
EMPTY[7] = 0


@pytest.mark.parametrize(
    ("queries", "database", "said"),
    [
        (VECTORS[:, :9], VECTORS, "queries and database must be vectors of one width, got 9 and 24"),
        (
            VECTORS[0],
            VECTORS,
            r"queries must be vectors \(n, dim\), .* got shape \(24,\): pass a single vector as \[vector\]",
        ),
        (VECTORS[:0], VECTORS, r"queries must be vectors \(n, dim\), at least one, got shape \(0, 24\)"),
        (VECTORS, HOLED, "database must be finite: row 5 holds NaN or infinity"),
        (VECTORS, EMPTY, "database must have a direction: row 7 is a zero vector"),
        (VECTORS * 1e30, VECTORS, "queries must be finite: row 0 holds values too large to be squared"),
        ([["a", "b"]], VECTORS, "not compatible with arrays of bytes/strings"),
        ([[1.0], [1.0, 2.0]], VECTORS, "setting an array element with a sequence"),
        (VECTORS > 0, VECTORS, "queries must hold real numbers, got torch.bool"),
        (
            np.ma.masked_array(VECTORS.numpy(), VECTORS.numpy() > 0),
            VECTORS,
            "queries must not have masked values",
        ),
        (VECTORS[:1], VECTORS[:5], "top is 8, but the database has only 5 items: use top=5 or less"),
    ],
)
def test_vectors_that_are_none(queries, database, said):
    with pytest.raises(ValueError, match=said):
        AFFINITY.rerank(queries, database)


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([[0, 1, 2]], "top is 8, but lists hold only 3 items: use top=3 or less"),
        ([[*range(95), 96]], "lists must hold database indices, 0 to 95, got 96 in row 0"),
        ([[-1, *range(20)]], "lists must hold database indices, 0 to 95, got -1 in row 0"),
        ([[0, 1, 2, 3, 4, 5, 6, 7, 3]], "lists must hold each item at most once, got 3 twice in row 0"),
        ([[0.0, 1.0]], r"lists must hold database indices \(integers\), got torch.float64"),
        ([0, 1], r"lists must be \(1, m\), one list per query, got shape \(2,\)"),
        (np.zeros((2, 3), int), r"lists must be \(1, m\), one list per query, got shape \(2, 3\)"),
    ],
)
def test_lists_that_do_not_fit(lists, said):
    with pytest.raises(ValueError, match=said):
        AFFINITY.rerank_lists(VECTORS[:1], VECTORS, lists)


class Found:
    ntotal, d = 96, 24

    def __init__(self, places):
        self.places = places

    def search(self, vectors, k):
        return None, self.places


def test_an_index_that_does_not_fit():
    few = Found(np.zeros((1, 8), int))
    few.ntotal = 40
    with pytest.raises(ValueError, match="index does not fit the database: it has 40 items, not 96"):
        AFFINITY.rerank(VECTORS[:1], VECTORS, index=few)
    few.ntotal, few.d = 96, 3
    with pytest.raises(ValueError, match="index does not fit the database: it has 3 dims, not 24"):
        AFFINITY.rerank(VECTORS[:1], VECTORS, index=few)
    for places, said in (
        ([[0, 1, 2, 3, 4, 5, -1, -1]], "index finds fewer than 8 items for query 0"),
        ([[0, 1, 2]], r"index.search must return indices \(1, 8\), got \(1, 3\)"),
        ([[0, 1, 2, 3, 4, 5, 6, 96]], "0 to 95, got 96 in row 0"),
    ):
        with pytest.raises(ValueError, match=said):
            AFFINITY.rerank(VECTORS[:1], VECTORS, index=Found(places))
    with pytest.raises(TypeError, match=r"index must have search\(vectors, k\), like a faiss index, got list"):
        AFFINITY.rerank(VECTORS[:1], VECTORS, index=[])


@pytest.mark.parametrize(
    ("options", "features", "labels", "said"),
    [
        ({}, VECTORS, None, "Reranker requires labels to be passed, but the target labels is None"),
        ({}, None, LABELS, "features must be an array, got a single value"),
        ({}, VECTORS, LABELS[:9], r"inconsistent numbers of samples: \[96, 9\]"),
        ({}, VECTORS, torch.arange(96), "labels must have two classes, one of two items, or more: 96 for 96 items"),
        ({}, VECTORS, torch.zeros(96), "labels must have two classes, .* or more: 1 for 96 items"),
        ({}, HOLED, LABELS, "features must be finite: row 5 holds NaN"),
        ({"anchors": 100}, VECTORS, LABELS, "anchors is 100, but features have only 96 items"),
        ({"kernel": "gaussian"}, VECTORS, LABELS, "kernel must be one of 'general', .* got 'gaussian'"),
        ({"steps": 0}, VECTORS, LABELS, "steps must be at least 1, got 0"),
        ({"top": 2.5}, VECTORS, LABELS, "top must be an integer, got 2.5"),
        ({"anchors": 1}, VECTORS, LABELS, "anchors must be at least 2, got 1"),
    ],
)
def test_what_cannot_be_learned_from(options, features, labels, said):
    model = kq.Reranker(**{"anchors": 8, "width": 8, "heads": 2, "steps": 2, "device": "cpu", **options})
    with pytest.raises((ValueError, TypeError), match=said):
        model.fit(features, labels)
    assert not hasattr(model, "network_")


def test_lists_shorter_than_the_anchors():
    model = kq.Reranker(top=8, anchors=12, width=8, heads=2, steps=1, device="cpu").fit(VECTORS, LABELS)
    with pytest.raises(ValueError, match="anchors is 12, but lists have 8 candidates: use at most 9"):
        model.rerank(VECTORS[:1], VECTORS)
    assert model.rerank(VECTORS[:1], VECTORS, top=11)[0].shape == (1, 11)
    with pytest.raises(ValueError, match="This Reranker instance is not fitted yet"):
        kq.Reranker().rerank(VECTORS[:1], VECTORS)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (kq.AlphaQueryExpansion(alpha=-1.0, device="cpu"), "alpha must be at least 0, got -1.0"),
        (kq.KReciprocalReranker(weight=2.0, device="cpu"), "weight must be from 0 to 1, got 2.0"),
        (kq.KReciprocalReranker(neighbours=3, device="cpu"), "smoothing must be at most neighbours, 3, got 6"),
        (kq.AffinityReranker(top=8, anchors=0, device="cpu"), "anchors must be at least 1, got 0"),
        (kq.AffinityReranker(top=8, anchors=4, device="gpu"), "device must be 'auto', 'cpu'"),
    ],
)
def test_parameters_that_do_not_fit(model, said):
    with pytest.raises(ValueError, match=said):
        model.rerank(VECTORS[:1], VECTORS)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ({"names": ["a"]}, "names must have one entry per item of the database, 96, got 1"),
        ({"query_names": ["a", "b"]}, "query_names must have one entry per query, 1, got 2"),
        ({"images": np.zeros((96, 2, 2))}, r"images must be uint8 .* got float64 \(96, 2, 2, 1\)"),
        ({"relevant": [[0], [1]]}, "relevant must have one entry for each of 1 queries, got 2"),
    ],
)
def test_what_cannot_be_shown(shown, said):
    with pytest.raises(ValueError, match=said):
        AFFINITY.moves(VECTORS[:1], VECTORS, **shown)
