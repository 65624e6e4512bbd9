"""What re-rankers say of what they cannot use, in one sentence each."""

from functools import partial

import numpy as np
import pytest
import torch

import keyquery as kq
from tests.learn.rerank.groups import curves

pytestmark = pytest.mark.unchecked
VECTORS, LABELS = curves(4, seed=0)
AFFINITY = kq.AffinityReranker(top=8, anchors=4, device="cpu")
NETWORK = {"anchors": 8, "width": 8, "heads": 2, "steps": 2, "device": "cpu"}


def changed(row, values):
    vectors = VECTORS.clone()
    vectors[row] = values
    return vectors


class Index:
    def __init__(self, lists, items=96, dims=24):
        self.lists, self.ntotal, self.d = lists, items, dims

    def search(self, vectors, k):
        return None, self.lists


def rerank(queries=VECTORS[:1], database=VECTORS, model=AFFINITY, **options):
    return partial(model.rerank, queries, database, **options)


def lists(lists):
    return partial(AFFINITY.rerank_lists, VECTORS[:1], VECTORS, lists)


def fit(features=VECTORS, labels=LABELS, **options):
    return partial(kq.Reranker(**{**NETWORK, **options}).fit, features, labels)


def show(**shown):
    return partial(AFFINITY.moves, VECTORS[:1], VECTORS, **shown)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (rerank(VECTORS[:, :9]), "queries and database must be vectors of one width, got 9 and 24"),
        (rerank(VECTORS[0]), r"queries must be .* got shape \(24,\): pass a single vector as \[vector\]"),
        (rerank(VECTORS[:0]), r"queries must be vectors \(n, dim\), at least one, got shape \(0, 24\)"),
        (rerank(database=changed(5, torch.nan)), "database must be finite: row 5 holds NaN or infinity"),
        (rerank(database=changed(7, 0.0)), "database must have a direction: row 7 is a zero vector"),
        (rerank(VECTORS * 1e30), "queries must be finite: row 0 holds values too large to be squared"),
        (rerank(VECTORS > 0), "queries must hold real numbers, got torch.bool"),
        (rerank(np.ma.masked_array(VECTORS.numpy(), VECTORS > 0)), "queries must not have masked values"),
        (rerank(database=VECTORS[:5]), "top is 8, but the database has only 5 items: use top=5 or less"),
        (rerank(index=Index([], items=40)), "index does not fit the database: it has 40 items, not 96"),
        (rerank(index=Index([], dims=3)), "index does not fit the database: it has 3 dims, not 24"),
        (rerank(index=Index([[0, 1, 2, 3, 4, 5, -1, -1]])), "index finds fewer than 8 items for query 0"),
        (rerank(index=Index([[0, 1, 2]])), r"index.search must return indices \(1, 8\), got \(1, 3\)"),
        (rerank(index=Index([[0, 1, 2, 3, 4, 5, 6, 96]])), "0 to 95, got 96 in row 0"),
        (rerank(index=[]), r"index must have search\(vectors, k\), like a faiss index, got list"),
        (rerank(model=kq.Reranker()), "This Reranker instance is not fitted yet"),
        (rerank(model=kq.AlphaQueryExpansion(alpha=-1.0)), "alpha must be at least 0, got -1.0"),
        (rerank(model=kq.DiffusionReranker(alpha=1.0)), r"alpha must be at least 0 and below 1, got 1\.0"),
        (rerank(model=kq.KReciprocalReranker(weight=2.0)), "weight must be from 0 to 1, got 2.0"),
        (rerank(model=kq.KReciprocalReranker(neighbours=3)), "smoothing must be at most neighbours, 3, got 6"),
        (rerank(model=kq.AffinityReranker(top=8, anchors=0)), "anchors must be at least 1, got 0"),
        (rerank(model=kq.AffinityReranker(device="gpu")), "device must be 'auto', 'cpu'"),
        (lists([[0, 1, 2]]), "top is 8, but lists hold only 3 items: use top=3 or less"),
        (lists([[*range(95), 96]]), "lists must hold database indices, 0 to 95, got 96 in row 0"),
        (lists([[-1, *range(20)]]), "lists must hold database indices, 0 to 95, got -1 in row 0"),
        (lists([[0, 1, 2, 3, 4, 5, 6, 7, 3]]), "lists must hold each item at most once, got 3 twice in row 0"),
        (lists([[0.0, 1.0]]), r"lists must hold database indices \(integers\), got torch.float64"),
        (lists([0, 1]), r"lists must be \(1, m\), one list per query, got shape \(2,\)"),
        (lists(np.zeros((2, 3), int)), r"lists must be \(1, m\), one list per query, got shape \(2, 3\)"),
        (fit(labels=None), "Reranker requires labels to be passed, but the target labels is None"),
        (fit(None), "features must be an array, got a single value"),
        (fit(labels=LABELS[:9]), r"inconsistent numbers of samples: \[96, 9\]"),
        (fit(labels=torch.arange(96)), "labels must have two classes or more, one of two items: 96 of 96 items"),
        (fit(labels=torch.zeros(96)), "labels must have two classes or more, .*: 1 of 96 items"),
        (fit(anchors=100), "anchors is 100, but features have only 96 items"),
        (fit(anchors=1), "anchors must be at least 2, got 1"),
        (fit(kernel="gaussian"), "kernel must be one of 'general', .* got 'gaussian'"),
        (fit(steps=0), "steps must be at least 1, got 0"),
        (fit(top=2.5), "top must be an integer, got 2.5"),
        (show(names=["a"]), "names must have one entry per item of the database, 96, got 1"),
        (show(query_names=["a", "b"]), "query_names must have one entry per query, 1, got 2"),
        (show(images=np.zeros((96, 2, 2))), r"images must be uint8 .* got float64 \(96, 2, 2, 1\)"),
        (show(relevant=[[0], [1]]), "relevant must have one entry for each of 1 queries, got 2"),
    ],
)
def test_what_cannot_be_used_is_told(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()
    assert not hasattr(call.func.__self__, "network_"), "nothing was learned"


def test_lists_shorter_than_the_anchors():
    model = kq.Reranker(top=8, **{**NETWORK, "anchors": 12}).fit(VECTORS, LABELS)
    with pytest.raises(ValueError, match="anchors is 12, but lists have 8 candidates: use at most 9"):
        model.rerank(VECTORS[:1], VECTORS)
    assert model.rerank(VECTORS[:1], VECTORS, top=11)[0].shape == (1, 11)
