"""Searches and re-rankers that learn nothing, each against its definition written out."""

import math

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

import keyquery as kq
from keyquery.learn.rerank import search as searching
from keyquery.learn.rerank.search import search
from tests.learn.rerank.groups import curves


@pytest.fixture(scope="module")
def groups():
    vectors, labels = curves(6, seed=2)
    return vectors[::5], vectors[torch.arange(len(vectors)) % 5 != 0], labels


def test_the_search_is_exact_and_breaks_ties_by_index(groups, monkeypatch):
    queries, database, _ = groups
    expected = (queries @ database.T).argsort(dim=1, descending=True)[:, :30]
    assert torch.equal(search(queries, database, 30), expected)
    monkeypatch.setattr(searching, "QUERIES", 7)
    monkeypatch.setattr(searching, "ITEMS", 11)  # fewer than are asked for
    assert torch.equal(search(queries, database, 30), expected)
    assert search(torch.eye(4)[:2], torch.eye(4)[[1, 0, 1, 0, 1, 0]], 3).tolist() == [[1, 3, 5], [0, 2, 4]]


def test_a_search_of_ones_own_is_the_first_round(groups):
    queries, database, _ = groups
    asked = []

    class Every:
        """Finds the items at even places alone."""

        def search(self, vectors, k):
            asked.append(vectors)
            found = 2 * search(torch.from_numpy(vectors), database[::2], k)
            return np.zeros(found.shape), found.numpy()

    model = kq.AffinityReranker(20, 8, "cpu")
    lists = 2 * search(queries, database[::2], 20)
    for one, other in zip(
        model.rerank(queries, database, index=Every()), model.rerank_lists(queries, database, lists), strict=True
    ):
        assert torch.equal(one, other)
    expansion = kq.AlphaQueryExpansion(20, device="cpu")
    order, _ = expansion.rerank(queries, database, index=Every())
    assert torch.equal(order, 2 * expansion.rerank(queries, database[::2])[0])
    assert [one.shape for one in asked] == [queries.shape] * 3  # the expanded queries are asked, too


def test_affinities_are_compared_by_their_cosine(groups):
    queries, database, _ = groups
    order, scores = kq.AffinityReranker(top=24, anchors=12, device="cpu").rerank(queries, database)
    for query, mine, candidates, score in zip(queries, order, search(queries, database, 24), scores, strict=True):
        anchors = torch.cat((query.unsqueeze(0), database[candidates[:11]]))
        truth = torch.nn.functional.cosine_similarity(database[candidates] @ anchors.T, (anchors @ query)[None])
        assert torch.equal(mine, candidates[truth.argsort(descending=True, stable=True)])
        assert torch.allclose(score, truth.sort(descending=True).values, atol=1e-6)


def test_expanded_queries_are_sums_of_their_neighbours(groups):
    queries, database, _ = groups
    order, scores = kq.AlphaQueryExpansion(top=12, neighbours=3, alpha=2.5, device="cpu").rerank(queries, database)
    for query, mine, score in zip(queries.double(), order, scores, strict=True):
        like = database.double() @ query
        new = query.clone()
        for place in like.argsort(descending=True)[:3]:
            new += max(float(like[place]), 0.0) ** 2.5 * database[place]
        new = database.double() @ (new / new.norm())
        assert torch.equal(mine, new.argsort(descending=True)[:12])
        assert torch.allclose(score.double(), new.sort(descending=True).values[:12], atol=1e-6)


def reciprocal_by_sets(queries, database, lists, k, smoothing, weight):
    """Zhong et al.'s distance with Python's own sets, one pair at a time."""
    like = (database @ database.T).numpy()
    n, half = len(database), max(round(k / 2), 1)
    near = [[i, *(int(j) for j in np.argsort(-like[i], kind="stable") if j != i)] for i in range(n)]

    def mutual(i, size):
        return {j for j in near[i][:size] if i in near[j][:size]}

    def taken_in(own):
        whole = set(own)
        for j in own:
            theirs = mutual(j, half)
            if len(theirs & own) >= 2 / 3 * len(theirs):
                whole |= theirs
        return whole

    def weights(members, vector):
        row = {j: math.exp(float(vector @ database[j]) - 1) for j in members}
        return {j: value / sum(row.values()) for j, value in row.items()}

    def mean(rows):
        return {j: sum(row.get(j, 0.0) for row in rows) / len(rows) for row in rows for j in row}

    raw = [weights(taken_in(mutual(i, k)), database[i]) for i in range(n)]
    rows = [mean([raw[j] for j in near[i][:smoothing]]) for i in range(n)]
    scores = []
    for query, candidates in zip(queries, lists.tolist(), strict=True):
        own = {j for j in candidates[:k] if float(query @ database[j]) >= like[j, near[j][k - 1]] - 1e-6}
        others = min(smoothing, len(candidates)) - 1
        row = mean([weights(taken_in(own), query), *(raw[j] for j in candidates[:others])])
        line = []
        for j in candidates:
            shared = sum(min(value, rows[j].get(i, 0.0)) for i, value in row.items())
            line.append((1 - weight) * shared / (2 - shared) + weight * float(query @ database[j]))
        scores.append(line)
    return torch.tensor(scores)


@pytest.mark.parametrize(("k", "smoothing", "weight"), [(12, 4, 0.3), (7, 1, 0.0), (4, 2, 1.0)])
def test_neighbours_both_ways_are_those_of_sets(groups, k, smoothing, weight):
    queries, database, _ = groups
    lists = search(queries, database, 40)
    model = kq.KReciprocalReranker(top=40, neighbours=k, smoothing=smoothing, weight=weight, device="cpu")
    truth = reciprocal_by_sets(queries, database, lists, k, smoothing, weight)
    order, scores = model.rerank(queries, database)
    assert torch.allclose(scores, truth.sort(1, descending=True).values, atol=1e-5)
    back = truth.gather(
        1, torch.stack([(row == mine.unsqueeze(1)).nonzero()[:, 1] for row, mine in zip(lists, order, strict=True)])
    )
    assert torch.allclose(back, scores, atol=1e-5)
    assert torch.equal(order, lists) == (weight == 1)  # then it is the first round


@pytest.mark.parametrize("count", [1, 2, 7])
def test_databases_smaller_than_the_neighbours(groups, count):
    queries, database, _ = groups
    few, k = database[:count], min(12, count)
    lists = search(queries, few, count)
    truth = reciprocal_by_sets(queries, few, lists, k, min(4, k), 0.3)
    _, scores = kq.KReciprocalReranker(neighbours=12, smoothing=4, device="cpu").fit(few).rerank(queries)
    assert torch.allclose(scores, truth.sort(1, descending=True).values, atol=1e-5)
    order, _ = kq.AlphaQueryExpansion(neighbours=12, device="cpu").rerank(queries, few)
    expanded = queries + ((queries @ few.T).clamp(min=0) ** 3) @ few  # all items are neighbours
    assert torch.equal(order, (expanded @ few.T).argsort(1, descending=True))


def test_neighbours_count_beyond_the_candidates(groups):
    queries, database, _ = groups
    model = kq.KReciprocalReranker(top=5, neighbours=12, smoothing=4, device="cpu")
    truth = reciprocal_by_sets(queries, database, search(queries, database, 40), 12, 4, 0.3)[:, :5]
    _, scores = model.rerank(queries, database)
    assert scores.shape == (len(queries), 5)
    assert torch.allclose(scores, truth.sort(1, descending=True).values, atol=1e-5)
    _, scores = model.rerank_lists(queries, database, search(queries, database, 40))
    assert torch.allclose(scores, truth.sort(1, descending=True).values, atol=1e-5)
    short = search(queries, database, 3)  # all are the neighbours of a query
    _, scores = model.set_params(top=None, smoothing=6).rerank_lists(queries, database, short)
    truth = reciprocal_by_sets(queries, database, short, 12, 6, 0.3)
    assert torch.allclose(scores, truth.sort(1, descending=True).values, atol=1e-5)


def test_what_a_query_finds_does_not_depend_on_other_queries(groups):
    queries, database, _ = groups
    for model in (
        kq.KReciprocalReranker(top=20, neighbours=8, device="cpu"),
        kq.AlphaQueryExpansion(top=20, device="cpu"),
        kq.AffinityReranker(top=20, anchors=9, device="cpu"),
    ):
        together, alone = model.rerank(queries, database), model.rerank(queries[3:4], database)
        assert torch.equal(together[0][3:4], alone[0])
        assert torch.allclose(together[1][3:4], alone[1], atol=1e-6)
        assert model.fit() is model
        assert "top=9" in repr(model.set_params(top=9))


def test_moves_tell_places_before_and_after(groups):
    queries, database, _ = groups
    model = kq.KReciprocalReranker(top=30, neighbours=12, device="cpu")
    labels = torch.arange(6).repeat_interleave(24)
    relevant = (labels[::5].unsqueeze(1) == labels[torch.arange(len(labels)) % 5 != 0]).numpy()
    names = [f"item {place}" for place in range(len(database))]
    reading = model.moves(queries[:4], database, names=names, relevant=relevant[:4], most=6)
    first, (order, scores) = search(queries[:4], database, 30), model.rerank(queries[:4], database)
    assert reading.moved == int((first[:, :6] != order[:, :6]).sum())
    assert kq.Reading.load(reading.to_json()) == reading
    truth = kq.score_rankings(first, relevant[:4]), kq.score_rankings(order, relevant[:4])
    for number, one in enumerate(reading.queries):
        assert one["before"] == first[number, :6].tolist()
        assert one["after"] == order[number, :6].tolist()
        assert one["precision"]["before"] == truth[0].rows[number]["average_precision"]
        assert one["precision"]["after"] == truth[1].rows[number]["average_precision"]
        for item in one["items"]:
            assert first[number, item["before"] - 1] == order[number, item["after"] - 1] == item["item"]
            assert item["score"] == pytest.approx(float(scores[number, item["after"] - 1]))
            assert item["relevant"] == relevant[number, item["item"]]
            assert item["name"] == f"item {item['item']}"
    rows = reading.records()
    assert all(row["moved"] == row["before"] - row["after"] for row in rows)
    assert len(reading.to_frame()) == len(rows) == sum(len(one["items"]) for one in reading.queries)


def test_thumbnails_are_the_images():
    from PIL import Image

    rng = np.random.default_rng(0)
    small, large = rng.integers(256, size=(3, 5, 4), dtype=np.uint8), np.zeros((2, 130, 70, 3), np.uint8)
    large[..., :65, :, :], large[..., 0] = 200, 90
    reading = kq.AffinityReranker(2, 2, "cpu").moves(
        torch.eye(3)[:2], torch.eye(3), images=small, query_images=large, most=2
    )

    def opened(name):
        import base64
        import io

        return np.asarray(Image.open(io.BytesIO(base64.b64decode(reading.thumbnails[name]))))

    shown = {item for one in reading.queries for item in (*one["before"], *one["after"])}
    assert set(reading.thumbnails) == {"query 0", "query 1"} | {f"item {item}" for item in shown}
    for item in shown:
        assert np.array_equal(opened(f"item {item}"), small[item])
    found = opened("query 0")
    assert found.shape == (44, 24, 3)  # blocks of three, the last ones smaller
    assert (found[:21] == [90, 200, 200]).all()
    assert (found[22:] == [90, 0, 0]).all()


@pytest.mark.parametrize("kind", [kq.AffinityReranker, kq.AlphaQueryExpansion, kq.KReciprocalReranker])
def test_a_fitted_database_is_kept(groups, kind):
    queries, database, _ = groups  # fewer than 1,024 items
    model = kind(device="cpu")
    with pytest.raises(NotFittedError):
        check_is_fitted(model)
    with pytest.raises(ValueError, match=r"it may be omitted only after fit\(database\)"):
        model.rerank(queries)
    expected = model.rerank(queries, database)
    check_is_fitted(model.fit())
    for order, same in zip(expected, model.fit(database).rerank(queries), strict=True):
        assert torch.equal(order, same)
    assert expected[0].shape == (len(queries), len(database))
    other = model.rerank(queries, database[::2])[0]
    assert torch.equal(other, kind(device="cpu").rerank(queries, database[::2])[0]), "not the kept database"


def test_the_graph_of_a_fitted_database_is_computed_once(groups, monkeypatch):
    queries, database, _ = groups
    model = kq.KReciprocalReranker(device="cpu").fit(database)
    graph, computed = model._graph, []
    monkeypatch.setattr(model, "_graph", lambda *data: computed.append(1) or graph(*data))
    before = model.rerank(queries, database)[1]
    assert torch.equal(model.rerank(queries)[1], before)
    assert not computed
    changed = model.set_params(neighbours=8).rerank(queries)[1]
    assert computed
    assert torch.equal(changed, kq.KReciprocalReranker(neighbours=8, device="cpu").rerank(queries, database)[1])


def test_long_searches_show_progress(groups, monkeypatch, capsys):
    (queries, database, _), kind = groups, kq.KReciprocalReranker
    monkeypatch.setattr("keyquery.support.progress.SECONDS", 0.0)
    order, _ = kind(device="cpu", verbose=True).fit(database).rerank(queries)
    shown = capsys.readouterr().err
    assert "searching: 0 of 1, 0 s\n" in shown
    assert "re-ranking: 0 of " in shown
    assert torch.equal(order, kind(device="cpu").fit(database).rerank(queries)[0])
    assert capsys.readouterr().err == ""
