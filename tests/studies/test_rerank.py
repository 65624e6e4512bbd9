"""The study of re-ranking: its vectors, its splits, diffusion, and what is made of them."""

import io
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from keyquery_studies.rerank import datasets as labelled
from keyquery_studies.rerank.datasets import Sources, load_split, passages, prepare, split, stretches, votes_right
from keyquery_studies.rerank.embeddings import dino, image_vectors, load_dino, text_vectors
from keyquery_studies.rerank.study import METHODS, RerankStudy, RerankTrial
from keyquery_studies.rerank.study import run as run_rerank
from rich.console import Console
from torch.nn.functional import normalize
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.learn.rankings.rankings import score_revisited
from keyquery.learn.rerank.search import search
from keyquery.pages import terminal
from tests.learn.rerank.groups import curves

SIZES = {"top": 12, "anchors": 6, "width": 8, "steps": 2}
SMALL = {**SIZES, "device": "cpu"}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A tiny DINOv2 with random weights, as transformers has it and as its file."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=42, patch_size=14)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lambda1" in name or "norm" in name:
                weight.copy_(torch.rand(weight.shape) + 0.5)
    folder = tmp_path_factory.mktemp("dino")
    model.save_pretrained(folder)
    return model, folder / "model.safetensors"


@pytest.mark.parametrize("size", [42, 70, 28])
def test_dino_is_that_of_transformers(backbone, size):
    model, path = backbone
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        expected = model(images).last_hidden_state
        found = dino(images, load_dino(path))
    assert torch.allclose(found, expected, atol=2e-5)


def test_vectors_of_images_do_not_depend_on_the_batch(backbone):
    pixels = np.random.default_rng(0).integers(256, size=(5, 8, 8, 1), dtype=np.uint8)
    weights = load_dino(backbone[1])
    whole = image_vectors(pixels, weights, size=28)
    assert whole.shape == (5, 128)
    assert np.allclose(image_vectors(pixels, weights, size=28, batch=2), whole, atol=1e-5)
    assert np.allclose(image_vectors(np.repeat(pixels, 3, 3), weights, size=28), whole, atol=1e-5)
    assert not np.allclose(whole[0], whole[1], atol=1e-2)


def test_vectors_of_texts_are_means_over_their_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "on", "the", "mat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16)).eval()
    model.save_pretrained(tmp_path)
    transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    texts = ["a cat sat on the mat", "the mat", "a cat a cat a cat a cat"]
    found = text_vectors(texts, tmp_path, length=8, batch=2)
    for text, vector in zip(texts, found, strict=True):
        ids = [2, *(words.index(word) for word in text.split()[:6]), 3]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        assert np.allclose(vector, expected, atol=1e-5)
    with pytest.raises(ValueError, match="must be a transformers encoder with its tokenizer"):
        text_vectors(texts, kq.models.ENCODER)


def test_classes_to_learn_from_are_not_those_to_test_on():
    labels = np.repeat(np.arange(7), 10)
    features = np.arange(70.0)[:, None] * np.ones((1, 2))
    found = split(features, labels, seed=3)
    again, other = split(features, labels, seed=3), split(features, labels, seed=4)
    assert np.array_equal(found.queries, again.queries)
    assert not np.array_equal(found.queries, other.queries)
    tested = labels[np.concatenate((found.queries, found.database))[:, 0].astype(int)]
    assert len(np.unique(found.labels)) == 3
    assert not set(found.labels) & set(tested)
    assert len(tested) == 40
    assert len(found.queries) == 8
    for query, places in zip(found.queries, found.relevant, strict=True):
        label = labels[int(query[0])]
        expected = [place for place, one in enumerate(found.database) if labels[int(one[0])] == label]
        assert places.tolist() == expected
    with pytest.raises(ValueError, match="labels must have 4 classes or more, half of them for training, got 3"):
        split(features, labels % 3, seed=0)


def test_passages_are_labelled_by_their_work_or_by_a_column(tmp_path):
    (tmp_path / "works.txt").write_text("\f".join(f"word{work} " * (130 + work) for work in range(3)))
    texts, labels = passages(tmp_path / "works.txt")
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert all(text.split() == [f"word{label}"] * 60 for text, label in zip(texts, labels, strict=True))
    (tmp_path / "rows.tsv").write_text("label\ttext\nx\tone\ny\ttwo\n")
    assert passages(tmp_path / "rows.tsv")[0] == ["one", "two"]
    assert passages(tmp_path / "rows.tsv")[1].tolist() == ["x", "y"]


def test_stretches_are_passages_one_after_the_other(tmp_path):
    works = ["\n".join(f"w{work} {n}" for n in range(60 * 14 // 2 * sizes)) for work, sizes in enumerate((6, 3, 1))]
    (tmp_path / "works.txt").write_text("\f".join(works))
    texts, labels = stretches(tmp_path / "works.txt", most=72)  # two of each work, but the last has only one
    assert np.bincount(labels).tolist() == [12] * 5
    for label in range(5):
        words = " ".join(text for text, one in zip(texts, labels, strict=True) if one == label).split()
        assert len(set(words[::2])) == 1  # of one work
        numbers = [int(word) for word in words[1::2]]
        assert numbers == list(range(numbers[0], numbers[0] + 360))


@pytest.fixture(scope="module")
def sources(tmp_path_factory, backbone):
    """Images of four classes, each a stripe at a place of its own in noise."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 30)
    images = rng.integers(120, size=(120, 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 130
    np.savez(folder / "stripes.npz", images=images, labels=labels)
    return Sources(images=folder / "stripes.npz", weights=backbone[1], items=100)


@pytest.fixture(scope="module")
def study(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    return run_rerank(sources, out, seeds=(0, 1), **SMALL), out


def test_vectors_are_made_once_and_kept(sources, study, monkeypatch):
    _, out = study
    kept = sorted(out.glob("vectors-*.npz"))
    assert len(kept) == 1
    with np.load(kept[0]) as arrays:
        assert arrays["features"].shape == (100, 128)
        assert np.bincount(arrays["labels"]).tolist() == [25] * 4
    monkeypatch.setattr(labelled, "image_vectors", None)  # would fail if it were called
    before = {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    assert run_rerank(sources, out, seeds=(0, 1), **SMALL) == study[0]
    assert {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()} == before


def test_every_method_is_tried_on_every_split(study):
    reading, _ = study
    tried = {(row["method"], row["scope"], row["seed"]) for row in reading.rows}
    assert {method for method, _, _ in tried} == set(METHODS)
    whole = ("expansion", "reciprocal", "diffusion")
    assert len(tried) == len(reading.rows) == 2 * (len(METHODS) + len(whole))
    for row in reading.rows:
        assert row["medium"] is None
        assert (row["graph_s"] is not None) == (row["method"] in ("reciprocal", "diffusion"))
        assert (row["learn_s"] is not None) == row["method"].startswith("learned")
        assert row["ms"] > 0


def test_figures_are_those_of_the_split(study):
    reading, out = study
    facts = reading.provenance["sets"]["images"]
    for seed in (0, 1):
        data = load_split(out, "images", facts["digest"], seed)
        rows = {(row["method"], row["scope"]): row for row in reading.rows if row["seed"] == seed}
        models = {
            ("first round", None): None,
            ("affinity", "top"): kq.AffinityReranker(12, 6, "cpu"),
            ("expansion", "whole"): kq.AlphaQueryExpansion(len(data.database), device="cpu"),
        }
        for key, model in models.items():
            queries, database = (normalize(torch.from_numpy(x)) for x in (data.queries, data.database))
            lists = search(queries, database, len(database))
            like = (queries.double() @ database.double().T).gather(1, lists)
            assert bool((like.diff(dim=1) < 1e-6).all())  # in order, but for ties, which rounding breaks
            if model is not None:
                pair = (data.queries, data.database)
                lists = model.rerank(*pair)[0] if key[1] == "whole" else model.rerank_lists(*pair, lists)[0]
            truth = kq.score_rankings(lists, data.relevant, at=(10,)).mean
            assert rows[key]["average_precision"] == pytest.approx(truth["average_precision"], abs=1e-6)
            assert rows[key]["ndcg@10"] == pytest.approx(truth["ndcg@10"], abs=1e-6)


def test_a_summary_compares_with_the_first_round_of_the_same_seed():
    base = {"dataset": "images", "ndcg@10": 1.0, "medium": None, "hard": None, "ms": 1.0, "digest": "d", **SIZES}
    rows = [
        {**base, "method": method, "scope": scope, "seed": seed, "average_precision": value}
        for method, scope, values in (("first round", None, (0.4, 0.6)), ("affinity", "top", (0.5, 0.5)))
        for seed, value in enumerate(values)
    ]
    first, other = RerankStudy(rows=rows, provenance={}).summary()
    assert first["gain"] == 0
    assert other["gain"] == pytest.approx(0)
    assert other["gain_sd"] == pytest.approx(0.1 * 2**0.5)
    assert other["average_precision"] == 0.5
    joined = RerankStudy.joined(RerankStudy(rows=rows[:3]), RerankStudy(rows=rows[1:]))
    assert sorted(map(json.dumps, joined.rows)) == sorted(map(json.dumps, rows))


@pytest.mark.parametrize("other", [{"top": 24}, {"width": 16}, {"steps": 3}, {"digest": "e"}])
def test_runs_of_other_sizes_or_vectors_are_never_mixed(study, other):
    reading, _ = study
    halves = [{**row, **other, "average_precision": row["average_precision"] / 2} for row in reading.rows]
    both = RerankStudy.joined(reading, RerankStudy(rows=halves))
    alone, halved = reading.summary(), both.summary()[len(reading.summary()) :]
    assert both.summary()[: len(alone)] == alone
    assert [row["gain"] for row in halved] == pytest.approx([row["gain"] / 2 for row in alone])
    out = io.StringIO()
    terminal.show(both, Console(width=100, file=out))
    assert out.getvalue().count("mean of 2 seeds") == 2
    assert len(both.plot().axes) == 2


def test_the_clock_is_not_told_of_trials_that_shared_the_device(study):
    reading, out = study
    alone = RerankTrial(
        dataset="images", digest=reading.rows[0]["digest"], method="diffusion", seed=0, **{**SIZES, "top": 9}
    )
    shared = replace(alone, shared=True)
    assert shared.name == alone.name
    told, untold = alone.run(out, "cpu"), shared.run(out, "cpu")
    for row, other in zip(told["rows"], untold["rows"], strict=True):
        assert row["ms"] > 0
        assert row["graph_s"] > 0
        assert other == {**row, "ms": None, "graph_s": None, "learn_s": None}
    page = io.StringIO()
    rows = [{**row, "ms": None} for row in reading.rows]
    terminal.show(RerankStudy(rows=rows), Console(width=100, file=page))
    assert "None" not in page.getvalue()


def test_votes_are_those_of_the_five_nearest_others():
    vectors, labels = curves(6, seed=5)
    vectors = normalize(vectors + 0.25 * torch.randn(vectors.shape, generator=torch.Generator().manual_seed(0)), dim=1)
    right = 0
    for place, vector in enumerate(vectors):
        nearest = sorted((-float(other @ vector), i) for i, other in enumerate(vectors) if i != place)[:5]
        found = [int(labels[i]) for _, i in nearest]
        right += min(found, key=lambda label: (-found.count(label), label)) == int(labels[place])
    assert votes_right(vectors, labels.numpy()) == right / len(vectors)
    assert 0 < right < len(vectors)


def test_the_study_is_shown_drawn_and_comes_back(study):
    reading, _ = study
    out = io.StringIO()
    terminal.show(reading, Console(width=100, file=out))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "Images, K = 12, L = 6, width 8, 2 steps: mean of 2 seeds" in text
    assert text.count("k-reciprocal") == 2
    assert kq.Reading.load(reading.to_json()).summary() == reading.summary()
    assert len(reading.plot().axes) == 1


def test_benchmarks_run_out_of_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    learned, labels = curves(6, seed=0)
    np.savez(tmp_path / "train.npz", features=learned.numpy(), labels=labels.numpy())
    vectors, groups = curves(4, seed=1)
    queries, database = vectors[::12], vectors[torch.arange(96) % 12 != 0]
    there = groups[torch.arange(96) % 12 != 0]
    places = [rng.permutation(np.flatnonzero(there == group)) for group in groups[::12]]
    told = {
        "imlist": [f"image {i}" for i in range(88)],
        "qimlist": [f"query {i}" for i in range(8)],
        "gnd": [{"easy": one[:8], "hard": one[8:18], "junk": one[18:]} for one in places],
    }
    (tmp_path / "gnd_rmade.pkl").write_bytes(pickle.dumps(told, protocol=2))
    np.savez(tmp_path / "rmade.npz", Q=queries.numpy(), X=database.numpy())
    out = tmp_path / "out"
    reading = run_rerank(Sources(revisited=tmp_path), out, seeds=(0,), **SMALL)
    assert {row["dataset"] for row in reading.rows} == {"rmade"}
    first = next(row for row in reading.rows if row["method"] == "first round")
    lists = (queries @ database.T).argsort(dim=1, descending=True)
    truth = load_split(out, "rmade", reading.provenance["sets"]["rmade"]["digest"], 0).truth
    expected = score_revisited(lists, truth)
    for setup in ("medium", "hard"):
        assert first[setup] == pytest.approx(expected[setup].mean["trapezoidal_precision"])
    page = io.StringIO()
    terminal.show(reading, Console(width=100, file=page))
    assert "trapezoidal average precision, as in the revisited Oxford protocol" in page.getvalue()
    (tmp_path / "rmade.npz").unlink()
    with pytest.raises(ValueError, match=r"has gnd_rmade\.pkl, but neither rmade\.npz nor rmade\.mat"):
        prepare(Sources(revisited=tmp_path), out, "cpu")
    (tmp_path / "train.npz").unlink()
    with pytest.raises(ValueError, match=r"must hold gnd_NAME\.pkl, NAME\.npz or NAME\.mat, and train\.npz"):
        prepare(Sources(revisited=tmp_path), out, "cpu")


def test_sources_that_lack_something_are_told(tmp_path, sources, backbone):
    for given, said in (
        ({}, "pass at least one of images, digits, texts and revisited"),
        ({"digits": True}, "images need the weights of DINOv2"),
        ({"texts": tmp_path / "a.tsv"}, "texts need a sentence encoder"),
    ):
        with pytest.raises(ValueError, match=said):
            run_rerank(Sources(**given))
    with pytest.raises(FileNotFoundError, match="there is no"):
        run_rerank(Sources(images=tmp_path / "none.npz", weights=backbone[1]))
    np.savez(tmp_path / "bare.npz", images=np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(ValueError, match="must have labels"):
        run_rerank(Sources(images=tmp_path / "bare.npz", weights=backbone[1]))
    with pytest.raises(ValueError, match="is not a safetensors file"):
        run_rerank(Sources(images=sources.images, weights=tmp_path / "bare.npz"))


def test_the_command_line_runs_it(study, sources, tmp_path):
    _, out = study
    sizes = [f"--{name}={value}" for name, value in SMALL.items()]
    given = ["--images", str(sources.images), "--weights", str(sources.weights), "--items", "100"]
    options = ["--out", str(out), "--seed", "0", "--seed", "1", "--json", str(tmp_path / "a.json")]
    run = CliRunner().invoke(cli.app, ["study", "rerank", *given, *sizes, *options])
    assert run.exit_code == 0, run.output
    assert "query expansion" in run.output
    assert kq.Reading.load(tmp_path / "a.json").rows == study[0].rows
    assert CliRunner().invoke(cli.app, ["study", "rerank"]).exit_code != 0
