"""Directions by their tokens, and heads beside a corpus: what is co-occurrence is found, with its sign, and no more."""

import json
import re

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.instruments.look.embeddings import Corpus, centred, level
from tests.instruments.look.conftest import WORDS as TEXT
from tests.pages.readings import data_of, measure_of
from tests.processes import run

WORDS = 120


@pytest.fixture(scope="module")
def counts():
    """Words that come in pairs, some of them in one order alone."""
    rng = np.random.default_rng(0)
    return kq.Cooccurrence(rng.poisson(rng.gamma(0.3, 4.0, (WORDS, WORDS))))


@pytest.fixture(scope="module")
def corpus(counts):
    return Corpus(counts, torch.eye(WORDS))


def test_directions_are_told_by_their_tokens(encoder):
    path, _ = encoder
    head = kq.look(path, layers=[1], directions=2).heads[2]
    layer, embedding = kq.read(path)[1], kq.read(path).embedding()
    rows = embedding - embedding.mean(0)
    rows = rows / rows.norm(dim=1, keepdim=True)
    S = layer.form.symmetric.dense()[2].double()
    values, vectors = torch.linalg.eigh(S)
    top = vectors[:, values.abs().argmax()].float()
    along = rows @ top
    words = ["[PAD]", "[UNK]", *TEXT]
    names = [words[i] if i < len(words) else f"#{i}" for i in range(len(rows))]
    both = {frozenset(head["objects"][0][end]) for end in ("tokens", "opposite")}
    assert both == {frozenset(names[i] for i in (sign * along).topk(5).indices) for sign in (1, -1)}
    assert head["objects"][0]["value"] == pytest.approx(float(values[values.abs().argmax()]), rel=1e-4)
    planes = layer.form[2].skew_planes(1)
    A = planes.values[0] * (planes.source @ planes.target.mT - planes.target @ planes.source.mT)
    scores = rows.double() @ A @ rows.double().mT
    strongest = scores.flatten().argmax()
    assert head["relations"][0]["pairs"][0] == [names[strongest // len(rows)], names[strongest % len(rows)]]


def in_order(counts):
    """PPMI in the corpus's own order of words, by falling frequency."""
    return counts.only(np.argsort(-counts.frequency, kind="stable")).dense("ppmi").float()


def test_scores_that_are_the_corpus_are_explained_by_it(counts, corpus):
    ppmi = in_order(counts)
    whole, turned, halves = corpus.beside(torch.stack((3 * ppmi, ppmi.mT, ppmi + ppmi.mT)))
    for name in ("symmetric_cosine", "skew_cosine", "explained"):
        assert whole[name] == pytest.approx(1, abs=1e-5)
    assert (turned["symmetric_cosine"], turned["skew_cosine"]) == pytest.approx((1, -1), abs=1e-5)
    assert halves["symmetric_cosine"] == pytest.approx(1, abs=1e-5)
    assert halves["skew_cosine"] == 0  # what rounding leaves of a part is no part


def test_parts_of_scores_add_up(counts, corpus):
    """Explained is the R² of a least-squares fit by both parts, without the words' own pairs."""
    ppmi, scores = in_order(counts), torch.randn(WORDS, WORDS) + 0.7 * in_order(counts)
    shifted = scores + 5 * torch.randn(WORDS, 1) + 5 * torch.randn(WORDS)  # what a query or a key has of its own
    found = corpus.beside(shifted[None])[0]
    apart = ~torch.eye(WORDS, dtype=torch.bool)
    x = torch.stack([(centred(ppmi) + sign * centred(ppmi).mT)[apart] for sign in (1, -1)], 1).double().numpy()
    y = centred(scores)[apart].double().numpy()
    fit, *_ = np.linalg.lstsq(x, y, rcond=None)
    assert found["explained"] == pytest.approx(1 - ((y - x @ fit) ** 2).sum() / (y**2).sum(), abs=1e-5)


def test_scores_at_random_stay_within_chance(corpus):
    found = corpus.beside(torch.randn(200, WORDS, WORDS, generator=torch.Generator().manual_seed(1)))
    for name in ("symmetric_cosine", "skew_cosine"):
        beyond = sum(abs(one[name]) > one[f"{name}_chance"] for one in found)
        assert 1 <= beyond <= 24  # 10 of 200 are expected


def test_a_head_made_of_counts_is_found_in_a_checkpoint(counts):
    """Embeddings are one-hot, so that a head's form is its scores; the others are drawn at random."""
    layer = kq.Attention(WORDS, heads=2, head_dim=60, bias=False)
    form = counts.form("ppmi", rank=60)
    with torch.no_grad():
        layer.query.weight[:60] = form.query
        layer.key.weight[:60] = form.key

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding.from_pretrained(torch.eye(WORDS))
            self.attention = layer

    reading = kq.look(Tiny(), corpus=counts)
    own, other = (head["corpus"] for head in reading.heads)
    assert own["explained"] > 0.6
    assert all(abs(own[name]) > level(own, name) for name in ("symmetric_cosine", "skew_cosine", "explained"))
    assert other["explained"] < 0.01
    assert reading.corpus["compared"] == WORDS
    assert kq.Reading.load(reading.to_json()) == reading
    with pytest.raises(ValueError, match="corpus needs token embeddings"):
        kq.look(torch.nn.MultiheadAttention(8, 2), corpus=counts)
    with pytest.raises(ValueError, match="at least 20 different tokens of the model, got 19"):
        kq.look(Tiny(), corpus=counts.most(19))


def test_look_sets_the_models_that_ship_beside_a_corpus(tmp_path):
    files = {name: tmp_path / f"heads.{name}" for name in ("json", "csv", "html")}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    model = str(kq.models.DECODER)
    output = run("look", model, "--corpus", kq.models.TEXT, "--layers", "0", *options)
    assert "symmetric cosine" in output
    assert "skew cosine" in output
    assert re.search(r"0\.3 +[+-]0\.\d\d \(0\.\d\d\) +[+-]0\.\d\d \(0\.\d\d\) +\d+\.\d% \(", output)
    data = json.loads(files["json"].read_text())
    assert data["corpus"]["from"] == "text.txt"
    assert data["corpus"]["window"] == 5
    figures = data["heads"][0]["corpus"]
    assert len(figures) == 9
    assert "corpus_skew_cosine_random" in files["csv"].read_text().splitlines()[0]
    shown = data_of(files["html"].read_text())
    measure = measure_of(shown, "corpus.skew_cosine")
    assert measure["values"][0] == float(f"{figures['skew_cosine']:.3g}")
    assert measure["null"][0] == float(f"{level(figures, 'skew_cosine'):.3g}")
    assert "compared with text.txt" in shown["tabs"][0]["facts"]
