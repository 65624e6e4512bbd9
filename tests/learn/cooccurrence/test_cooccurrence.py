"""Counting words: against brute force, in any pieces, and whatever cannot be counted."""

import gzip
import lzma
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.learn.cooccurrence import tally
from keyquery.learn.cooccurrence.cooccurrence import KINDS, dealt
from keyquery.learn.cooccurrence.tally import words_in
from keyquery.support import files

TEXT = "The river flooded the bank; the bank had a loan. 'The river's loan', said the bank.\n\nA shore, a river\n" * 3
texts_of = st.lists(st.lists(st.sampled_from("abcde"), max_size=9).map(" ".join), min_size=1, max_size=5)


def brute(texts, window):
    """Pairs by two loops."""
    found = Counter()
    for text in texts:
        words = words_in(text)
        for i, one in enumerate(words):
            for other in words[i + 1 : i + 1 + window]:
                found[one, other] += 1
    return found


def told(counts):
    dense, words = counts.dense(), counts.vocabulary
    return {(words[i], words[j]): float(dense[i, j]) for i, j in dense.nonzero().tolist()}


@given(texts_of, st.integers(1, 6), st.booleans())
def test_counts_are_those_of_two_loops(texts, window, directed):
    expected = brute(texts, window)
    if not expected or len({word for text in texts for word in words_in(text)}) < 2:
        with pytest.raises(ValueError, match="words"):
            kq.Cooccurrence.from_text(texts, window, directed)
        return
    found = kq.Cooccurrence.from_text(texts, window, directed)
    if not directed:
        expected = expected + Counter({(b, a): count for (a, b), count in expected.items()})
    assert told(found) == dict(expected)
    frequency = Counter(word for text in texts for word in words_in(text))
    assert dict(zip(found.vocabulary, found.frequency.tolist(), strict=True)) == dict(frequency)
    assert found.frequency.tolist() == sorted(found.frequency.tolist(), reverse=True)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_pieces_and_chunks_change_nothing(tmp_path, monkeypatch, chunk):
    whole = told(kq.Cooccurrence.from_text(TEXT, 4))
    assert whole == dict(brute([TEXT], 4))
    monkeypatch.setattr(tally, "CHUNK", chunk)
    monkeypatch.setattr(files, "BLOCK", 16)
    monkeypatch.setattr(files, "PART", 5)
    for name, pack in (("a.txt", bytes), ("a.txt.xz", lzma.compress), ("a.txt.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(pack(TEXT.encode()))
        assert len(list(files.text_pieces(path))) == files.count_pieces(path)
        assert told(kq.Cooccurrence.from_text(path, 4)) == whole


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    """Runs that were counted are merged, and what was counted is gone."""
    monkeypatch.setattr(tally, "CHUNK", 64)
    rng = np.random.default_rng(0)
    one = tally.Tally(2)
    sizes = []
    for _ in range(60):
        one.add(" ".join(rng.choice(list("abcdefgh"), 100)) + " ")
        sizes.append(sum(len(keys) for keys, _ in one._runs) + sum(part.size for part in one._waiting))
    assert max(sizes) <= 2 * 64 + 2 * 64 + 200


def test_words_outside_a_vocabulary_keep_their_places():
    found = kq.Cooccurrence.from_text("a x b a", 2, vocabulary=["b", "a"])
    assert found.vocabulary == ["b", "a"]
    assert told(found) == {("a", "b"): 1, ("b", "a"): 1}
    assert found.tokens == 4


def test_ids_and_tokenizers_count_alike(tmp_path):
    speaker = Tokenizer.load(kq.models.DECODER)
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    by_text = kq.Cooccurrence.from_text(path, 3, tokenizer=speaker)
    by_ids = kq.Cooccurrence.from_ids(speaker.encode(TEXT.rstrip()), by_text.vocabulary, 3)
    assert len(by_text) == len(speaker)
    differ = (by_text.dense() - by_ids.dense()).nonzero()
    newline = by_text.vocabulary.index("Ċ")
    assert all(newline in pair for pair in differ.tolist())  # the last blanks alone
    assert by_text.numbers(" river").tolist() == speaker.encode(" river")


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_figures_are_the_dense_ones(kind):
    x = kq.Cooccurrence.from_text(TEXT, 3)
    counts = x.dense()
    if kind == "log":
        expected = (counts + 1).log()
    elif kind == "ppmi":
        share = counts * counts.sum() / (counts.sum(1, keepdim=True) * counts.sum(0))
        expected = torch.where(counts > 0, share.log().clamp(min=0), 0.0)
    else:
        expected = counts
    assert x.dense(kind).allclose(expected, atol=1e-12)
    assert x.symmetry(kind) == pytest.approx(float((expected * expected.mT).sum() / expected.square().sum()))
    assert x.symmetric().symmetry(kind) == pytest.approx(1)


def test_the_published_projection():
    words = ["river", "bank", "loan", "money", "flooded", "shore", "rely"]
    counts = [[0, 4, 0, 0, 5, 6, 0], [4, 0, 6, 5, 3, 5, 4], [0, 6, 0, 7, 0, 0, 2], [0, 5, 7, 0, 0, 0, 3]]
    counts += [[5, 3, 0, 0, 0, 4, 0], [6, 5, 0, 0, 4, 0, 0], [0, 4, 2, 3, 0, 0, 0]]
    reading = kq.Cooccurrence(counts, words).project("river bank flooded")
    assert reading.M == [[0, 4, 5], [4, 0, 3], [5, 3, 0]]
    assert reading.norm == [pytest.approx(row) for row in [[0, 4 / 9, 5 / 9], [4 / 7, 0, 3 / 7], [5 / 8, 3 / 8, 0]]]
    assert reading.E[1:] == [[15, 25, 0, 0, 20, 36, 0], [12, 20, 18, 15, 34, 45, 12]]
    assert [round(value, 1) for value in reading.e] == [22.7, 20, 14, 11.7, 22, 40.3, 9.3]
    assert reading.p == pytest.approx(torch.tensor(reading.e).softmax(0).tolist(), abs=1e-6)
    assert kq.Reading.load(reading.to_json()) == reading
    assert reading.records()[5]["word"] == "shore"
    assert reading.best(1) == ["shore"]


def test_a_form_of_counts_points_as_they_do():
    x = kq.Cooccurrence.from_text(TEXT, 2)
    assert x.directed
    assert not x.symmetric().directed
    assert float(x.form("log").symmetry) == pytest.approx(x.symmetry("log"), abs=1e-9)
    assert x.form("ppmi", rank=2).rank == 2


BAD = {
    "empty": (lambda: kq.Cooccurrence.from_text(""), "texts hold no two words of the vocabulary within the window"),
    "one word": (lambda: kq.Cooccurrence.from_text("a a a"), "a vocabulary must have at least two words, got 1"),
    "apart": (lambda: kq.Cooccurrence.from_text(["a", "b"]), "texts hold no two words"),
    "window": (lambda: kq.Cooccurrence.from_text("a b", window=0), "window must be at least 1, got 0"),
    "unknown": (lambda: kq.Cooccurrence.from_text("a b", vocabulary=["c", "d"]), "no two words of the vocabulary"),
    "a number": (lambda: kq.Cooccurrence.from_text(5), "texts must be a string, a pathlib.Path, or several"),
    "a file": (
        lambda: kq.Cooccurrence.from_text("README.md"),
        r"README.md is a file; pass pathlib.Path\('README.md'\)",
    ),
    "both": (lambda: kq.Cooccurrence.from_text("a b", vocabulary=["a"], tokenizer=1), "either vocabulary or tokenizer"),
    "negative": (lambda: kq.Cooccurrence([[0, -1], [1, 0]]), "finite, non-negative counts, got -1"),
    "nan": (lambda: kq.Cooccurrence([[0, float("nan")], [1, 0]]), "finite, non-negative counts, got nan"),
    "ragged": (lambda: kq.Cooccurrence([[0, 1], [1]]), "rows of equal length"),
    "one": (lambda: kq.Cooccurrence([[1]], ["a"]), "a vocabulary must have at least two words, got 1"),
    "names": (lambda: kq.Cooccurrence(torch.ones(2, 2), ["a"]), "one word per row of the matrix, 2, got 1"),
    "twice": (lambda: kq.Cooccurrence(torch.ones(2, 2), ["a", "a"]), "duplicates, got 'a' twice"),
    "outside": (lambda: pair().project("a c"), "vocabulary of 2 words, and 'c' is not"),
    "no tokens": (lambda: pair().project(""), "tokens must contain at least one word"),
    "kind": (lambda: pair().project("a", kind="pmi"), "kind must be one of 'counts', 'log', 'ppmi'"),
    "smooth": (lambda: pair().dense("log", -1), "smooth must be at least 0, got -1"),
    "ids": (lambda: kq.Cooccurrence.from_ids([0, 7], ["a", "b"]), "ids must be below the vocabulary size, 2"),
    "floats": (lambda: kq.Cooccurrence.from_ids([0.5], ["a", "b"]), "ids must be a list of integers"),
    "most": (lambda: pair().most(1), "count must be between 2 and 2, got 1"),
}


def pair():
    return kq.Cooccurrence(torch.ones(2, 2), ["a", "b"])


@pytest.mark.parametrize("case", BAD)
@pytest.mark.unchecked
def test_bad_input_is_told_in_a_sentence(case):
    call, said = BAD[case]
    with pytest.raises((ValueError, TypeError), match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_squares_of_very_many_words_are_refused():
    many = kq.Cooccurrence.from_text(" ".join(f"w{i}" for i in range(20_001)), 1)
    with pytest.raises(ValueError, match=r"a dense matrix of 20,001 words is too large"):
        many.dense()
    assert many.most(2).dense().tolist() == [[0, 1], [0, 0]]
    assert many.project("w0 w1").M == [[0, 1], [0, 0]]


def drawn(seed, n, zeros=0.4):
    """Directed counts, of which some are 0, and a whole row may be."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(1, 50, (n, n), generator=generator).double()
    return torch.where(torch.rand(n, n, generator=generator) < zeros, 0.0, found)


@given(st.integers(0, 1000), st.integers(2, 8), st.data())
def test_no_form_of_the_rank_is_nearer(seed, n, data):
    x = drawn(seed, n)
    rank = data.draw(st.integers(1, n))
    left = float((x - dealt(x, 1, rank)[0].dense()).norm())
    values = np.linalg.svd(x.numpy(), compute_uv=False)
    assert left == pytest.approx(np.sqrt((values[rank:] ** 2).sum()), abs=1e-9)


def test_pieces_add_up_to_the_nearest_form_and_share_its_values():
    x = drawn(3, 9)
    pieces = dealt(x, heads=3, rank=2)
    assert pieces.batch == (3,)
    assert pieces.dense().sum(0).allclose(dealt(x, 1, 6)[0].dense(), atol=1e-9)
    values = torch.linalg.svdvals(x)
    for head in range(3):
        assert pieces[head].singular_values().allclose(values[[head, head + 3]])


@pytest.mark.parametrize(
    ("shape", "heads", "rank", "said"),
    [
        ((2, 3), 1, None, "matrix must have shape .* with n = 2"),
        ((3, 3), 4, None, "heads must be between 1 and 3"),
        ((4, 4), 2, 3, "rank must be between 1 and 2, got 3"),
    ],
)
@pytest.mark.unchecked
def test_what_cannot_be_dealt_is_told(shape, heads, rank, said):
    with pytest.raises(ValueError, match=said):
        dealt(torch.ones(shape), heads, rank)
