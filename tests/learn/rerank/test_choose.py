"""choose_reranker: the planted best is chosen, and its cross-validated score is of queries it was not chosen on."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.learn.rerank import choose
from tests.learn.rerank.groups import curves


class Fixed(kq.AffinityReranker):
    """Puts the item that it is told to first, per query: each setting is right for the queries below `top`."""

    def _ordered(self, asked, lists, top):
        right = torch.arange(len(lists)) < self.anchors
        order = torch.where(right[:, None], torch.tensor([[0, 1]]), torch.tensor([[1, 0]]))
        return order, torch.ones(order.shape)


def test_the_planted_best_is_chosen_and_others_are_scored(monkeypatch):
    counts = (3, 9, 6)  # of ten queries, those that a setting answers
    monkeypatch.setattr(choose, "_candidates", lambda top, device: [Fixed(top, count, "cpu") for count in counts])
    chosen = kq.choose_reranker(torch.eye(10)[:, :2] + 0.1, torch.eye(2), [[0]] * 10)
    assert chosen.reranker.anchors == 9
    assert [row["average_precision"] for row in chosen.scores] == pytest.approx([0.95, 0.8, 0.65])
    assert "anchors=9" in chosen.scores[0]["reranker"]
    assert chosen.cross_validated == pytest.approx(0.95)


def test_the_score_of_choosing_is_of_other_queries(monkeypatch):
    """Of two settings each is right on one half of the queries: chosen on one half, both fail on the other."""

    class Half(Fixed):
        def _ordered(self, asked, lists, top):
            right = torch.arange(len(lists)) % 2 == self.anchors - 1
            order = torch.where(right[:, None], torch.tensor([[0, 1]]), torch.tensor([[1, 0]]))
            return order, torch.ones(order.shape)

    monkeypatch.setattr(choose, "_candidates", lambda top, device: [Half(top, half, "cpu") for half in (1, 2)])
    chosen = kq.choose_reranker(torch.eye(10)[:, :2] + 0.1, torch.eye(2), [[0]] * 10, folds=2)
    assert chosen.scores[0]["average_precision"] == pytest.approx(0.75)
    assert chosen.cross_validated == pytest.approx(0.5)


def test_diffusion_is_chosen_on_curves():
    database, labels = curves(8, seed=3)
    chosen = kq.choose_reranker(database[::3], database, labels[::3, None] == labels, device="cpu")
    assert isinstance(chosen.reranker, kq.DiffusionReranker)
    order, _ = chosen.reranker.rerank(database[::3])
    truth = kq.score_rankings(order, labels[::3, None] == labels).mean["average_precision"]
    assert chosen.scores[0]["average_precision"] == pytest.approx(truth)
    first = (database[::3] @ database.T).argsort(dim=1, descending=True)
    plain = kq.score_rankings(first, labels[::3, None] == labels).mean["average_precision"]
    assert chosen.before == pytest.approx(plain)
    assert chosen.cross_validated > chosen.before


def test_queries_without_relevant_items_do_not_count():
    database, labels = curves(2, seed=0)
    relevant = [np.flatnonzero(labels == label) for label in labels[:12]]
    with pytest.raises(ValueError, match="5 folds need as many queries with relevant items, got 4"):
        kq.choose_reranker(database[:12], database, [*relevant[:4], *[[]] * 8], device="cpu")
