"""Searches and re-rankers that learn nothing, each against its definition written out."""

import base64
import io
import math

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

import keyquery as kq
from keyquery.learn.rerank import base
from keyquery.learn.rerank.base import search
from tests.learn.rerank.groups import curves

ALL = [kq.AffinityReranker, kq.AlphaQueryExpansion, kq.KReciprocalReranker, kq.DiffusionReranker]


@pytest.fixture(scope="module")
def groups():
    vectors, _ = curves(6, seed=2)
    return vectors[::5], vectors[torch.arange(len(vectors)) % 5 != 0]


def test_the_search_is_exact_and_breaks_ties_by_index(groups, monkeypatch):
    queries, database = groups
    expected = (queries @ database.T).argsort(dim=1, descending=True)[:, :30]
    assert torch.equal(search(queries, database, 30), expected)
    monkeypatch.setattr(base, "QUERIES", 7)
    monkeypatch.setattr(base, "ITEMS", 11)  # fewer than are asked for
    assert torch.equal(search(queries, database, 30), expected)
    assert search(torch.eye(4)[:2], torch.eye(4)[[1, 0, 1, 0, 1, 0]], 3).tolist() == [[1, 3, 5], [0, 2, 4]]


def test_an_index_stands_in_for_the_search(groups):
    queries, database = groups
    asked = []

    class Even:
        """Finds the items of even numbers alone."""

        def search(self, vectors, k):
            asked.append(vectors.shape)
            items = 2 * search(torch.from_numpy(vectors), database[::2], k)
            return np.zeros(items.shape), items.numpy()

    model = kq.AffinityReranker(20, 8, "cpu")
    lists = model.rerank_lists(queries, database, 2 * search(queries, database[::2], 20))
    for part, expected in zip(model.rerank(queries, database, index=Even()), lists, strict=True):
        assert torch.equal(part, expected)
    expansion = kq.AlphaQueryExpansion(20, device="cpu")
    order, _ = expansion.rerank(queries, database, index=Even())
    assert torch.equal(order, 2 * expansion.rerank(queries, database[::2])[0])
    assert asked == [queries.shape] * 3  # the expanded queries are asked, too


def test_affinities_are_compared_by_their_cosine(groups):
    queries, database = groups
    all_anchors = [kq.AffinityReranker(24, anchors, "cpu").rerank(queries, database)[1] for anchors in (None, 25)]
    assert torch.equal(*all_anchors)
    order, scores = kq.AffinityReranker(top=24, anchors=12, device="cpu").rerank(queries, database)
    for query, items, candidates, score in zip(queries, order, search(queries, database, 24), scores, strict=True):
        anchors = torch.cat((query.unsqueeze(0), database[candidates[:11]]))
        truth = torch.nn.functional.cosine_similarity(database[candidates] @ anchors.T, (anchors @ query)[None])
        assert torch.equal(items, candidates[truth.argsort(descending=True, stable=True)])
        assert torch.allclose(score, truth.sort(descending=True).values, atol=1e-6)


def test_expanded_queries_are_sums_of_their_neighbours(groups):
    queries, database = groups
    order, scores = kq.AlphaQueryExpansion(top=12, neighbours=3, alpha=2.5, device="cpu").rerank(queries, database)
    for query, items, score in zip(queries.double(), order, scores, strict=True):
        like = database.double() @ query
        expanded = query.clone()
        for neighbour in like.argsort(descending=True)[:3]:
            expanded += max(float(like[neighbour]), 0.0) ** 2.5 * database[neighbour]
        truth = database.double() @ (expanded / expanded.norm())
        assert torch.equal(items, truth.argsort(descending=True)[:12])
        assert torch.allclose(score.double(), truth.sort(descending=True).values[:12], atol=1e-6)
    few = database[:7]  # all are neighbours
    order, _ = kq.AlphaQueryExpansion(neighbours=12, device="cpu").rerank(queries, few)
    expanded = queries + ((queries @ few.T).clamp(min=0) ** 3) @ few
    assert torch.equal(order, (expanded @ few.T).argsort(1, descending=True))


def reciprocal_by_sets(queries, database, lists, k, smoothing, weight):
    """Zhong et al.'s distance with Python's own sets, one pair at a time."""
    like = (database @ database.T).numpy()
    n, half = len(database), max(round(k / 2), 1)
    near = [[i, *(int(j) for j in np.argsort(-like[i], kind="stable") if j != i)] for i in range(n)]

    def mutual(i, size):
        return {j for j in near[i][:size] if i in near[j][:size]}

    def expanded(members):
        whole = set(members)
        for j in members:
            theirs = mutual(j, half)
            if len(theirs & members) >= 2 / 3 * len(theirs):
                whole |= theirs
        return whole

    def weights(members, vector):
        row = {j: math.exp(float(vector @ database[j]) - 1) for j in members}
        return {j: value / sum(row.values()) for j, value in row.items()}

    def mean(rows):
        return {j: sum(row.get(j, 0.0) for row in rows) / len(rows) for row in rows for j in row}

    raw = [weights(expanded(mutual(i, k)), database[i]) for i in range(n)]
    rows = [mean([raw[j] for j in near[i][:smoothing]]) for i in range(n)]
    scores = []
    for query, candidates in zip(queries, lists.tolist(), strict=True):
        members = {j for j in candidates[:k] if float(query @ database[j]) >= like[j, near[j][k - 1]] - 1e-6}
        others = min(smoothing, len(candidates)) - 1
        row = mean([weights(expanded(members), query), *(raw[j] for j in candidates[:others])])
        line = []
        for j in candidates:
            shared = sum(min(value, rows[j].get(i, 0.0)) for i, value in row.items())
            line.append((1 - weight) * shared / (2 - shared) + weight * float(query @ database[j]))
        scores.append(line)
    return torch.tensor(scores)


@pytest.mark.parametrize(("k", "smoothing", "weight"), [(12, 4, 0.3), (7, 1, 0.0), (4, 2, 1.0)])
def test_reciprocal_neighbours_are_those_of_sets(groups, k, smoothing, weight):
    queries, database = groups
    lists = search(queries, database, 40)
    model = kq.KReciprocalReranker(top=40, neighbours=k, smoothing=smoothing, weight=weight, device="cpu")
    truth = reciprocal_by_sets(queries, database, lists, k, smoothing, weight)
    order, scores = model.rerank(queries, database)
    assert torch.allclose(scores, truth.sort(1, descending=True).values, atol=1e-5)
    by_item = torch.zeros(len(queries), len(database)).scatter(1, lists, truth)
    assert torch.allclose(by_item.gather(1, order), scores, atol=1e-5)
    assert torch.equal(order, lists) == (weight == 1)  # then it is the first ranking


@pytest.mark.parametrize(
    ("items", "top", "k", "smoothing", "found"),
    [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (7, 7, 7, 4, 7), (115, 5, 12, 4, 40), (115, 3, 12, 6, 3)],
)
def test_neighbours_are_few_or_beyond_the_candidates(groups, items, top, k, smoothing, found):
    """In small databases all are neighbours; else those of a query count beyond `top`, as far as lists go."""
    queries, database = groups[0], groups[1][:items]
    lists = search(queries, database, found)
    truth = reciprocal_by_sets(queries, database, lists, k, smoothing, 0.3)[:, :top].sort(1, descending=True).values
    model = kq.KReciprocalReranker(top, neighbours=12, smoothing=smoothing, device="cpu").fit(database)
    assert torch.allclose(model.rerank_lists(queries, database, lists)[1], truth, atol=1e-5)
    if found > k or found == items:
        assert torch.allclose(model.rerank(queries)[1], truth, atol=1e-5)


@pytest.mark.parametrize("kind", ALL)
def test_queries_do_not_affect_each_other_and_a_fitted_database_is_kept(groups, kind, monkeypatch):
    queries, database = groups  # fewer than 1,024 items
    model = kind(device="cpu")
    with pytest.raises(NotFittedError):
        check_is_fitted(model)
    with pytest.raises(ValueError, match=r"it may be omitted only after fit\(database\)"):
        model.rerank(queries)
    expected = model.rerank(queries, database)
    assert expected[0].shape == (len(queries), len(database))
    check_is_fitted(model.fit())
    monkeypatch.setattr("keyquery.learn.rerank.diffusion.NUMBERS", 2 * len(database))
    for part, again in zip(expected, model.fit(database).rerank(queries), strict=True):
        assert torch.allclose(again, part, atol=1e-5)
    order, scores = model.rerank(queries[3:4])
    assert torch.equal(order, expected[0][3:4])
    assert torch.allclose(scores, expected[1][3:4], atol=1e-5)
    other = model.rerank(queries, database[::2])[0]
    assert torch.equal(other, kind(device="cpu").rerank(queries, database[::2])[0]), "not the kept database"


def test_the_graph_of_a_fitted_database_is_computed_once(groups, monkeypatch):
    queries, database = groups
    model = kq.KReciprocalReranker(device="cpu").fit(database)
    graph, computed = model._graph, []
    monkeypatch.setattr(model, "_graph", lambda *data: computed.append(1) or graph(*data))
    before = model.rerank(queries, database)[1]
    assert torch.equal(model.rerank(queries)[1], before)
    assert not computed
    changed = model.set_params(neighbours=8).rerank(queries)[1]
    assert computed
    assert torch.equal(changed, kq.KReciprocalReranker(neighbours=8, device="cpu").rerank(queries, database)[1])


def test_moves_tell_ranks_before_and_after(groups):
    queries, database = groups
    model = kq.KReciprocalReranker(top=30, neighbours=12, device="cpu")
    labels = torch.arange(6).repeat_interleave(24)
    relevant = (labels[::5].unsqueeze(1) == labels[torch.arange(len(labels)) % 5 != 0]).numpy()
    names = [f"item {number}" for number in range(len(database))]
    reading = model.moves(queries[:4], database, names=names, relevant=relevant[:4], most=6)
    first, (order, scores) = search(queries[:4], database, 30), model.rerank(queries[:4], database)
    assert reading.moved == int((first[:, :6] != order[:, :6]).sum())
    assert kq.Reading.load(reading.to_json()) == reading
    precisions = [kq.score_rankings(lists, relevant[:4]).rows for lists in (first, order)]
    for number, query in enumerate(reading.queries):
        assert query["before"] == first[number, :6].tolist()
        assert query["after"] == order[number, :6].tolist()
        assert list(query["precision"].values()) == [rows[number]["average_precision"] for rows in precisions]
        for item in query["items"]:
            assert first[number, item["before"] - 1] == order[number, item["after"] - 1] == item["item"]
            assert item["score"] == pytest.approx(float(scores[number, item["after"] - 1]))
            assert item["relevant"] == relevant[number, item["item"]]
            assert item["name"] == f"item {item['item']}"
    rows = reading.records()
    assert all(row["moved"] == row["before"] - row["after"] for row in rows)
    assert len(reading.to_frame()) == len(rows) == sum(len(query["items"]) for query in reading.queries)


def test_thumbnails_are_the_images():
    from PIL import Image

    small = np.random.default_rng(0).integers(256, size=(3, 5, 4), dtype=np.uint8)
    large = np.zeros((2, 130, 70, 3), np.uint8)
    large[..., :65, :, :], large[..., 0] = 200, 90
    images = {"images": small, "query_images": large}
    reading = kq.AffinityReranker(2, 2, "cpu").moves(torch.eye(3)[:2], torch.eye(3), most=2, **images)
    shown = {item["item"] for query in reading.queries for item in query["items"]}
    assert set(reading.thumbnails) == {"query 0", "query 1"} | {f"item {item}" for item in shown}
    files = {name: io.BytesIO(base64.b64decode(data)) for name, data in reading.thumbnails.items()}
    assert all(np.array_equal(Image.open(files[f"item {item}"]), small[item]) for item in shown)
    pixels = np.asarray(Image.open(files["query 0"]))
    assert pixels.shape == (44, 24, 3)  # blocks of three, the last ones smaller
    assert (pixels[:21] == [90, 200, 200]).all()
    assert (pixels[22:] == [90, 0, 0]).all()


def test_long_searches_show_progress(groups, monkeypatch, capsys):
    (queries, database), kind = groups, kq.KReciprocalReranker
    monkeypatch.setattr("keyquery.support.progress.SECONDS", 0.0)
    order, _ = kind(device="cpu", verbose=True).fit(database).rerank(queries)
    shown = capsys.readouterr().err
    assert "searching: 0 of 1, 0 s\n" in shown
    assert "re-ranking: 0 of " in shown
    assert torch.equal(order, kind(device="cpu").fit(database).rerank(queries)[0])
    assert capsys.readouterr().err == ""
