"""Measures of rankings against hand-made cases, definitions written out, and scikit-learn."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score

import keyquery as kq
from keyquery.learn.data import Revisited
from keyquery.learn.rankings.rankings import score_revisited


@pytest.mark.parametrize("missing", [0, 3])  # relevant items that are in no list
def test_average_precisions_are_their_definitions(missing):
    for pattern in itertools.product([False, True], repeat=6):
        total, recall, precision, area, mean = sum(pattern) + missing, 0.0, 1.0, 0.0, 0.0
        if not total:
            continue
        for rank in range(6):  # the curve of precision over recall, from recall 0 at precision 1
            hits = sum(pattern[: rank + 1])
            new_recall, new_precision = hits / total, hits / (rank + 1)
            area += (new_recall - recall) * (precision + new_precision) / 2
            mean += pattern[rank] * new_precision / total
            recall, precision = new_recall, new_precision
        scores = kq.score_rankings([list(range(6))], [[*np.flatnonzero(pattern), *range(100, 100 + missing)]]).mean
        assert scores["trapezoidal_precision"] == pytest.approx(area)
        assert scores["average_precision"] == pytest.approx(mean)
    assert kq.score_rankings([[0, 1]], [[1]]).mean["trapezoidal_precision"] == 0.25


def test_measures_are_those_of_scikit_learn_where_it_has_them():
    rng = np.random.default_rng(0)
    scores, relevant = rng.normal(size=(30, 40)), rng.random((30, 40)) < 0.2
    relevant[:, 3] = True
    lists = np.argsort(-scores, axis=1)
    found = kq.score_rankings(lists, relevant, at=(1, 5, 40))
    for row, truth, score in zip(found.rows, relevant, scores, strict=True):
        assert row["average_precision"] == pytest.approx(average_precision_score(truth, score))
        for k in (5, 40):
            assert row[f"ndcg@{k}"] == pytest.approx(ndcg_score([truth], [score], k=k))
        assert row["recall@5"] == truth[np.argsort(-score)[:5]].sum() / truth.sum()
        assert row["recall@40"] == 1
    assert kq.score_rankings(torch.from_numpy(lists), torch.from_numpy(relevant), at=(1, 5, 40)).rows == found.rows
    indices = [np.flatnonzero(row) for row in relevant]
    assert kq.score_rankings(lists, indices, at=(1, 5, 40)).rows == found.rows


def test_junk_is_neither_right_nor_wrong():
    with_junk = kq.score_rankings([[9, 0, 8, 1, 2]], [[0, 2]], junk=[[9, 8]], at=(1, 2))
    without = kq.score_rankings([[0, 1, 2]], [[0, 2]], at=(1, 2))
    assert with_junk.rows == without.rows


def test_a_query_to_which_nothing_is_relevant_counts_nowhere():
    both = kq.score_rankings([[0, 1], [1, 0]], [[1], []])
    assert both.rows[1]["average_precision"] is None
    assert both.mean == kq.score_rankings([[0, 1]], [[1]]).mean
    assert kq.Reading.load(both.to_json()) == both
    assert kq.score_rankings([[0, 1]], [[]]).mean == {}


def test_each_setup_of_the_revisited_protocol_has_its_own_junk():
    rng = np.random.default_rng(1)
    orders = [rng.permutation(30) for _ in range(5)]
    easy, hard, junk = (tuple(order[a:b] for order in orders) for a, b in ((0, 4), (4, 9), (9, 12)))
    hard = (*hard[:4], hard[4][:0])  # the last query has no hard image
    vectors = rng.normal(size=(30, 4))
    truth = Revisited(vectors[:5], vectors, easy, hard, junk)
    ranked = np.stack([rng.permutation(30) for _ in range(5)])
    found = score_revisited(ranked, truth)
    for name, wanted, left_out in (
        ("easy", [easy], [hard, junk]),
        ("medium", [easy, hard], [junk]),
        ("hard", [hard], [easy, junk]),
    ):
        relevant, removed = (
            [np.concatenate([group[query] for group in groups]) for query in range(5)] for groups in (wanted, left_out)
        )
        kept = [[row[~np.isin(row, out)].tolist()] for row, out in zip(ranked, removed, strict=True)]
        alone = [kq.score_rankings(lists, [items]) for lists, items in zip(kept, relevant, strict=True)]
        values = [scores.mean["trapezoidal_precision"] for scores in alone if scores.mean]
        assert found[name].mean["trapezoidal_precision"] == pytest.approx(np.mean(values))
        assert len(found[name].scored) == len(values) == (4 if name == "hard" else 5)


@pytest.mark.parametrize(
    ("ranked", "relevant", "junk", "said"),
    [
        ([[0.5, 1.0]], [[0]], None, r"ranked must be \(q, m\), item indices from 0, got float64"),
        ([0, 1], [[0]], None, r"ranked must be \(q, m\), .* of shape \(2,\)"),
        ([[0, -1]], [[0]], None, r"ranked must be \(q, m\), item indices from 0, got int64"),
        ([[0, 1, 0]], [[0]], None, "ranked must contain each item once, got 0 twice in row 0"),
        ([[0, 1]], [[0], [1]], None, "relevant must have one entry for each of 1 queries, got 2"),
        ([[0, 1]], [["a"]], None, "relevant must be indices ≥ 0 or booleans"),
        ([[0, 1]], 3, None, "relevant must have one entry for each of 1 queries, got int"),
        ([[0, 1]], [[0]], [[0]], "an item must not be both relevant and junk, got 0 in both"),
        ([[0, 1]], [[0]], [[-2]], "junk must be indices ≥ 0"),
        ([[0, 3]], [[True, False]], None, "relevant must have a boolean for every item up to 3, got 2"),
    ],
)
@pytest.mark.unchecked
def test_what_cannot_be_scored_is_told(ranked, relevant, junk, said):
    with pytest.raises(ValueError, match=said):
        kq.score_rankings(ranked, relevant, junk)
