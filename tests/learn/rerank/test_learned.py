"""Reranker: what it must not depend on, its network and loss written out, what it learns, and its file."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import keyquery as kq
from keyquery.learn.inputs.vectors import Asked
from keyquery.learn.rerank import base, learned, network
from keyquery.learn.rerank.base import search
from keyquery.learn.rerank.graph import nearest
from keyquery.learn.rerank.learned import Lists
from keyquery.learn.rerank.network import RerankNetwork, distance, rerank_loss
from tests.learn.rerank.groups import curves, mean_precision, others

SMALL = {"top": 24, "anchors": 12, "width": 16, "depth": 2, "heads": 2, "device": "cpu", "random_state": 0}


@pytest.fixture(scope="module")
def fitted():
    return kq.Reranker(**SMALL, steps=20).fit(*curves(12, seed=0))


@pytest.fixture(scope="module")
def unseen():
    vectors, _ = curves(8, seed=1)
    return vectors[::6], vectors


def test_it_learns_what_holds_of_groups_it_has_never_seen(monkeypatch):
    monkeypatch.setattr(learned, "BATCH", 16)
    model = kq.Reranker(top=64, anchors=24, width=32, steps=100, heads=4, random_state=0, device="cpu")
    model.fit(*curves(60, 0))
    assert model.history_[-1]["loss"] < model.history_[0]["loss"] - 0.05
    vectors, labels = curves(30, 100)
    first = others(vectors)
    order, scores = model.rerank_lists(vectors, vectors, first)
    expanded, _ = kq.AlphaQueryExpansion(top=len(first[0]), device="cpu").rerank_lists(vectors, vectors, first)
    assert torch.equal(order[:, 64:], first[:, 64:])
    assert torch.equal(order[:, :64].sort(1).values, first[:, :64].sort(1).values)
    assert (scores.diff(dim=1) <= 0).all()
    before, rival, after = (mean_precision(lists, labels) for lists in (first, expanded, order))
    assert after - before >= 0.02
    assert after - 0.005 > rival > before


def test_rotations_and_lengths_change_no_score(fitted, unseen):
    queries, database = (part.double() for part in unseen)
    turn = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64))[0]
    short = fitted.rerank(queries.float(), database.float())[1]
    fitted.network_.double()
    try:
        order, scores = fitted.rerank(queries, database)
        again, same = fitted.rerank(3 * queries @ turn, (torch.rand(len(database), 1) + 0.5) * database @ turn)
    finally:
        fitted.network_.float()
    assert scores.dtype == torch.float64
    assert torch.equal(order, again)
    assert (scores - same).abs().max() <= 1e-9
    assert (scores - short.double()).abs().max() < 1e-4


@pytest.mark.parametrize("limits", [{"ROWS": {"cpu": 25}}, {"FLOATS": 64 * 60}, {"FLOATS": 1}])  # 1, 2 and 1 lists
def test_batches_do_not_matter(fitted, unseen, monkeypatch, limits):
    queries, database = unseen
    order, scores = fitted.rerank(queries, database)
    for name, value in limits.items():
        monkeypatch.setattr(base, name, value)
    again, same = fitted.rerank(queries, database)
    assert torch.equal(order, again)
    assert torch.allclose(scores, same, atol=1e-6)


@torch.no_grad()
def test_scores_are_those_of_a_network_written_out():
    """Lists of odd length, one batch of several and a last one of fewer, against every product in float64."""
    vectors = normalize(torch.randn(60, 10, generator=torch.Generator().manual_seed(0)), dim=1)
    asked, lists = Asked(vectors[:7], vectors), search(vectors[:7], vectors, 23)
    torch.manual_seed(0)
    model = kq.Reranker(heads=3, device="cpu")
    model.network_ = network = model._network(anchors=9, width=15)
    for weight in network.parameters():
        weight.add_(torch.randn_like(weight) / 4)
    scores = model._scores(asked, lists, 23)
    network.double()
    for query, candidates, found in zip(asked.queries.double(), lists, scores, strict=True):
        rows = torch.cat((query.unsqueeze(0), vectors[candidates].double()))
        x = network.tokens(rows @ rows[:9].T)
        for block in network.blocks:
            layer, y = block.attention, block.attention_norm(x)
            q, k, v = (part(y).view(24, 3, 5).transpose(0, 1) for part in (layer.query, layer.key, layer.value))
            x = x + layer.output((torch.softmax(q @ k.mT / 5**0.5, -1) @ v).transpose(0, 1).reshape(24, 15))
            x = x + block.mlp(block.mlp_norm(x))
        expected = torch.nn.functional.cosine_similarity(x[1:], x[:1])
        assert expected.std() > 1e-2
        assert (found - expected).abs().max() < 1e-5


@torch.no_grad()
def test_the_loss_is_its_definition():
    torch.manual_seed(0)
    network = RerankNetwork(6, 8, 1, 2).eval()
    affinity, positive = torch.randn(5, 9, 6), torch.rand(5, 9) < 0.4
    positive[:, 0] = True
    total = 0.0
    for a, p in zip(affinity, positive, strict=True):
        x = network(a.unsqueeze(0))[0]
        s = [float(torch.exp(torch.nn.functional.cosine_similarity(x[0], row, dim=0) / 2)) for row in x]
        total += -np.log(sum(v for v, there in zip(s, p, strict=True) if there) / sum(s))
        b = network.back(x)
        gaps = [(u / u.norm() - v / v.norm()).norm() for u, v in zip(a, b, strict=True)]
        total += 0.2 * float(torch.stack(gaps).mean())
    assert float(rerank_loss(network, (affinity, positive))) == pytest.approx(total / 5, abs=1e-5)
    a = torch.randn(3, 5, 4)
    assert torch.allclose(distance(a, 7 * a), torch.tensor(0.01))  # 1e-4 is the least square
    assert torch.allclose(distance(a, -a), torch.tensor(2.0))


def test_lists_to_learn_from_begin_with_the_item_itself():
    features, labels = curves(4, seed=0)
    twins = torch.cat((features, features[:20], features[:1].expand(12, -1)))  # more equal ones than fit into a list
    labels = torch.cat((labels, labels[:20], labels[:1].expand(12)))
    lists = nearest(twins, 8)
    assert torch.equal(lists[:, 0], torch.arange(len(twins)))
    assert all(len(set(row.tolist())) == 8 for row in lists)
    data = Lists(twins, lists, labels, torch.arange(len(twins)))
    affinity, positive = data.draw(0, torch.Generator().manual_seed(1))
    assert torch.allclose(affinity[:, 0, 0], torch.ones(learned.BATCH))
    assert positive[:, 0].all()
    for row in affinity:  # shuffled rows, anchors in the order of the list
        assert torch.allclose(row[1:, 0].sort(descending=True).values, row[0, 1:], atol=1e-6)


def test_an_item_alone_with_its_label_is_only_a_candidate(monkeypatch):
    features, labels = curves(10, seed=0)
    labels[-24:] = torch.arange(1000, 1024)
    drawn, draw = [], Lists.draw
    monkeypatch.setattr(Lists, "draw", lambda *given: drawn.append(draw(*given)[1]) or draw(*given))
    kq.Reranker(**SMALL, steps=20).fit(features, labels)
    assert torch.cat(drawn).sum(1).min() > 1
    assert len(drawn) == 20


def test_all_kinds_of_input_mean_the_same(fitted, unseen):
    queries, database = unseen
    order, scores = fitted.rerank(queries, database)
    for give in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.double):
        found, same = fitted.rerank(give(queries), give(database))
        assert isinstance(found, torch.Tensor if give is torch.Tensor.double else np.ndarray)
        assert np.array_equal(found, order)
        assert np.allclose(same, scores, atol=1e-6)


def test_sizes_of_the_network_are_the_published_ones_or_fit_the_data(unseen, tmp_path, monkeypatch):
    for width, heads, expected in ((64, 12, 8), (768, 12, 12), (10, 4, 2), (7, 6, 1)):
        assert kq.Reranker(heads=heads)._network(4, width).blocks[0].attention.heads == expected
    published = kq.Reranker()._network(*network.sizes_for(50_000))
    assert sum(weight.numel() for weight in published.parameters()) == pytest.approx(14.96e6, rel=1e-3)
    features, labels = curves(6, 0)
    model = kq.Reranker(steps=1, random_state=0, device="cpu").fit(features[:90], labels[:90])
    assert tuple(model.network_.tokens.weight.shape) == (64, 90)
    model.save(tmp_path / "model.safetensors")
    again = kq.Reranker.load(tmp_path / "model.safetensors", device="cpu")
    queries, database = unseen
    assert torch.equal(again.rerank(queries, database)[0], model.rerank(queries, database)[0])
    monkeypatch.setattr(network, "LARGE", 100)
    monkeypatch.setattr(learned, "BATCH", 2)
    rates, recipe = [], learned.Recipe
    monkeypatch.setattr(learned, "Recipe", lambda *a, **facts: rates.append(facts["lr"]) or recipe(*a, **facts))
    large = kq.Reranker(steps=1, depth=1, random_state=0, device="cpu").fit(features[:100], labels[:100])
    assert tuple(large.network_.tokens.weight.shape) == (768, 100)
    assert rates == [pytest.approx(1e-3 * (64 / 768) ** 0.5)]


def test_a_file_of_another_version_is_read_and_looked_at(fitted, tmp_path, monkeypatch):
    monkeypatch.setitem(fitted.params_, "former", 1)  # of a version that had another parameter
    fitted.save(tmp_path / "model.safetensors")
    assert kq.Reranker.load(tmp_path / "model.safetensors", device="cpu").get_params() == fitted.get_params()
    assert len(kq.look(tmp_path / "model.safetensors").heads) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gives_the_scores_of_the_processor(fitted, unseen, monkeypatch):
    torch.use_deterministic_algorithms(False)  # else cuBLAS asks for a setting of its own
    queries, database = unseen
    lists = search(queries, database, 24)
    _, scores = fitted.rerank_lists(queries, database, lists)
    monkeypatch.setattr(fitted, "device", "cuda")
    order, half = fitted.rerank_lists(queries.cuda(), database.cuda(), lists.cuda())
    assert order.is_cuda
    assert (half.cpu() - scores).abs().max() < 2e-3
    for kind in (kq.AlphaQueryExpansion(24, device="cuda"), kq.KReciprocalReranker(24, 8, device="cuda")):
        there, here = kind.rerank(queries, database)[0], kind.set_params(device="cpu").rerank(queries, database)[0]
        assert (there == here).float().mean() > 0.98
    model = kq.Reranker(**{**SMALL, "device": "cuda"}, steps=20).fit(*curves(12, seed=0))
    assert model.history_[-1]["loss"] < model.history_[0]["loss"]
