"""`Cooccurrence`: how often words stand near each other, and the attention that comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from keyquery.forms import Form
from keyquery.forms import counts as algebra
from keyquery.forms.counts import KINDS
from keyquery.instruments.cooccurrence.tally import CHUNK, Tally, read_into, words_in
from keyquery.reading import Reading, digest, plain, provenance
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.progress import Progress, bars

DENSE = 20_000  # words, beyond which a square of them would not fit into most memories
LOW = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Projection(Reading, kind="projection"):
    """What the words of a sequence make of every word of the vocabulary."""

    units: ClassVar[Mapping[str, str]] = {
        "M": "QSQᵀ, between the words of the sequence",
        "norm": "M over its rows' sums",
        "E": "M(QS), a row for each word of the sequence, a column for each of the vocabulary",
        "e": "mean of E's rows",
        "p": "softmax of e",
    }

    tokens: list[str]
    M: list[list[float]]
    norm: list[list[float]]
    E: list[list[float]]
    e: list[float]
    p: list[float]
    vocabulary: list[str]

    def best(self, count: int = 5) -> list[str]:
        """The words with the highest e, those of the sequence left out.

        >>> s = kq.Cooccurrence(torch.tensor([[0, 2, 1], [2, 0, 4], [1, 4, 0]]), ["tea", "cup", "pot"])
        >>> s.project("cup").best(1)
        ['tea']
        """
        ranked = sorted(range(len(self.e)), key=lambda place: -self.e[place])
        return [self.vocabulary[at] for at in ranked if self.vocabulary[at] not in self.tokens][:count]

    def records(self) -> list[dict[str, Any]]:
        """One row a word of the vocabulary: its e and p."""
        return [{"word": word, "e": e, "p": p} for word, e, p in zip(self.vocabulary, self.e, self.p, strict=True)]


class Cooccurrence:
    """Counts X of pairs of words, kept sparse: X[i, j] is how often word j stands after word i, or near it.

    Of any square matrix of counts and its words; of texts, see `from_text`. `directed` says whether X tells before from
    after; it is what the matrix itself says.

    >>> x = kq.Cooccurrence(torch.tensor([[0, 3, 1], [1, 0, 0], [1, 0, 0]]), ["tea", "cup", "pot"])
    >>> x
    Cooccurrence(3 words, 6 pairs seen, 4 different, directed)
    >>> x.symmetric().dense()[0]
    tensor([0., 4., 2.], dtype=torch.float64)
    """

    def __init__(self, matrix: Any, vocabulary: Sequence[str] | None = None) -> None:
        dense = _checked(matrix)
        rows, columns = dense.nonzero()
        words = [str(number) for number in range(len(dense))] if vocabulary is None else list(vocabulary)
        if len(words) != len(dense):
            raise ValueError(f"vocabulary must name the {len(dense)} words of the matrix, got {len(words)}")
        self._fill(rows, columns, dense[rows, columns], words)

    @classmethod
    def from_text(
        cls,
        texts: Any,
        window: int = 5,
        directed: bool = True,
        vocabulary: Sequence[str] | None = None,
        tokenizer: Any = None,
        verbose: bool = False,
        progress: Progress | None = None,
    ) -> Cooccurrence:
        """Counts of texts: a text, a `pathlib.Path` to a file of one (packed or not), or several of these.

        X[i, j] counts how often j stands at most `window` places after i in the same text; without `directed`, before
        or after. Files are read piece by piece, and may be larger than memory. Words are those that `words_in` finds,
        in lower case and by falling frequency; of a given `vocabulary` only these, where others keep their places; or
        the tokens of a `tokenizer`, as models have one. `verbose` shows a bar, `progress` is one of yours.

        >>> kq.Cooccurrence.from_text("A rose is a rose is a rose.", window=2)
        Cooccurrence(4 words, 15 pairs seen, 8 different, directed)
        """
        check_count("window", window, least=1)
        if tokenizer is not None and vocabulary is not None:
            raise ValueError("give a vocabulary or a tokenizer, not both: a tokenizer has its own")
        words = _tokens_of(tokenizer) if tokenizer is not None else vocabulary
        encode = None if tokenizer is None else lambda text: encoded(tokenizer, text)
        tally = Tally(window, words, encode)
        with bars(verbose) as watch:
            read_into(tally, texts, progress or watch)
        made = cls._of(tally, tokenizer)
        return made if directed else made.symmetric()

    @classmethod
    def from_ids(cls, ids: Any, vocabulary: Sequence[str], window: int = 5) -> Cooccurrence:
        """Directed counts of one text whose words are numbers already, those of a vocabulary; below 0 they are holes.

        >>> kq.Cooccurrence.from_ids([0, 1, 0, 1], ["tick", "tock"], window=1).dense()
        tensor([[0., 2.],
                [1., 0.]], dtype=torch.float64)
        """
        check_count("window", window, least=1)
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(f"ids must be a list of integers, got shape {given.shape} of {given.dtype}")
        if given.size and given.max() >= len(vocabulary):
            raise ValueError(f"ids must be below {len(vocabulary)}, the words of the vocabulary, got {given.max()}")
        tally = Tally(window, vocabulary)
        for start in range(0, len(given), CHUNK):
            tally.take(given[start : start + CHUNK].astype(np.int64))
        return cls._of(tally)

    @classmethod
    def _of(cls, tally: Tally, tokenizer: Any = None) -> Cooccurrence:
        _require_words(tally)
        keys, counts = tally.pairs()
        rows, columns = keys >> 32, keys & LOW
        frequency, words = tally.frequency().astype(np.float64), tally.words
        if tally.open:
            order = sorted(range(len(words)), key=lambda at: (-frequency[at], words[at]))
            place = np.empty(len(order), dtype=np.int64)
            place[order] = np.arange(len(order))
            rows, columns, frequency = place[rows], place[columns], frequency[order]
            words = [words[at] for at in order]
        made = cls.__new__(cls)
        made._fill(rows, columns, counts.astype(np.float64), words, frequency, tally.tokens, tally.window, tokenizer)
        return made

    def _fill(
        self,
        rows: Int[ndarray, " pairs"],
        columns: Int[ndarray, " pairs"],
        counts: Float[ndarray, " pairs"],
        words: Sequence[str],
        frequency: Float[ndarray, " words"] | None = None,
        tokens: int | None = None,
        window: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        size = len(words)
        if size < 2:
            raise ValueError(f"a vocabulary must have at least two words, got {size}")
        if len(self._places(words)) != size:
            twice = next(word for word in words if list(words).count(word) > 1)
            raise ValueError(f"vocabulary must name every word once, got {twice!r} twice")
        order = ((rows << 32) | columns).argsort()
        self._rows, self._columns, self._counts = rows[order], columns[order], counts[order]
        self._starts = np.searchsorted(self._rows, np.arange(size + 1))
        self.vocabulary, self.tokens, self.window, self._tokenizer = list(words), tokens, window, tokenizer
        self.row_sums = np.bincount(rows, counts, size)
        self.column_sums = np.bincount(columns, counts, size)
        self.frequency = self.row_sums + self.column_sums if frequency is None else frequency
        self._at = self._places(words)

    @staticmethod
    def _places(words: Sequence[str]) -> dict[str, int]:
        return {word: place for place, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self.vocabulary)

    def __repr__(self) -> str:
        way = "directed" if self.directed else "symmetric"
        return (
            f"Cooccurrence({len(self):,} words, {self.total:,.10g} pairs seen, {len(self._counts):,} different, {way})"
        )

    @property
    def total(self) -> float:
        """ΣX."""
        return float(self._counts.sum())

    @property
    def directed(self) -> bool:
        """Whether X ≠ Xᵀ."""
        other = np.lexsort((self._rows, self._columns))
        pairs = ((self._rows, self._columns), (self._columns, self._rows))
        alike = all(bool((one == two[other]).all()) for one, two in pairs)
        return not (alike and bool((self._counts == self._counts[other]).all()))

    def reversed(self) -> Cooccurrence:
        """Xᵀ: the counts of the same texts read backwards.

        >>> bool((kq.Cooccurrence.from_text("a b c").reversed().dense() == torch.ones(3, 3).tril(-1)).all())
        True
        """
        return self._like(self._columns, self._rows, self._counts)

    def symmetric(self) -> Cooccurrence:
        """X + Xᵀ of a directed X: how often two words stand near each other, whichever comes first."""
        keys = np.concatenate(((self._rows << 32) | self._columns, (self._columns << 32) | self._rows))
        found, back = np.unique(keys, return_inverse=True)
        counts = np.bincount(back, np.concatenate((self._counts, self._counts)), len(found))
        return self._like(found >> 32, found & LOW, counts)

    def most(self, count: int) -> Cooccurrence:
        """Only the `count` most frequent words.

        >>> kq.Cooccurrence.from_text("a rose is a rose is a rose").most(2).vocabulary
        ['a', 'rose']
        """
        check_count("count", count, least=2, most=len(self))
        kept = np.sort(np.argsort(-self.frequency, kind="stable")[:count])
        return self.only(kept)

    def only(self, places: Int[ndarray, " kept"]) -> Cooccurrence:
        """Only these words, in the order given."""
        to = np.full(len(self), -1, dtype=np.int64)
        to[places] = np.arange(len(places))
        there = (to[self._rows] >= 0) & (to[self._columns] >= 0)
        words = [self.vocabulary[at] for at in places]
        rows, columns = to[self._rows[there]], to[self._columns[there]]
        made = Cooccurrence.__new__(Cooccurrence)
        made._fill(rows, columns, self._counts[there], words, self.frequency[places], self.tokens, self.window)
        return made

    def _like(self, rows: Any, columns: Any, counts: Any) -> Cooccurrence:
        made = Cooccurrence.__new__(Cooccurrence)
        facts = (self.vocabulary, self.frequency, self.tokens, self.window, self._tokenizer)
        made._fill(rows, columns, counts, *facts)
        return made

    def values(self, kind: str = "counts") -> Float[Tensor, " pairs"]:
        """What is kept of each pair that was seen: its count, log(1 + count), or PPMI."""
        check_choice("kind", kind, KINDS)
        counts = torch.from_numpy(self._counts)
        if kind == "counts":
            return counts
        if kind == "log":
            return algebra.log_counts(counts)
        sums = (torch.from_numpy(self.row_sums[self._rows]), torch.from_numpy(self.column_sums[self._columns]))
        return algebra.ppmi(counts, *sums, self.total)

    def dense(self, kind: str = "counts", smooth: float = 1.0) -> Float[Tensor, "words words"]:
        """X, log(X + smooth) or PPMI as a whole matrix, float64. With smooth = 0, pairs never seen are −∞.

        >>> x = kq.Cooccurrence(torch.tensor([[0, 4], [4, 0]]))
        >>> x.dense("log", smooth=0)
        tensor([[  -inf, 1.3863],
                [1.3863,   -inf]], dtype=torch.float64)
        """
        check_number("smooth", smooth)
        if smooth < 0:
            raise ValueError(f"smooth must be at least 0, got {smooth}")
        if len(self) > DENSE:
            raise ValueError(f"a square of {len(self):,} words is too large: take the most frequent, .most({DENSE})")
        made = torch.zeros(len(self), len(self), dtype=torch.float64)
        at = torch.from_numpy(self._rows), torch.from_numpy(self._columns)
        if kind == "log" and smooth != 1:
            made[at] = torch.from_numpy(self._counts)
            return algebra.log_counts(made, smooth)
        made[at] = self.values(kind)
        return made

    def project(self, tokens: Any, kind: str = "counts", positions: Any = None, normed: bool = False) -> Projection:
        """A sequence's M = QSQᵀ, Norm(M), E = M(QS), e = mean E, p = softmax(e); S is X, or what `kind` makes of it.

        `tokens` is a text, or words or their numbers. `positions` P (R, n) is added to the selector Q. With `normed`, E
        is Norm(M)(QS): p of raw counts is all but one-hot.

        >>> s = kq.Cooccurrence(torch.tensor([[0, 2, 1], [2, 0, 0], [1, 0, 0]]), ["tea", "cup", "pot"])
        >>> s.project("tea cup").e
        [2.0, 2.0, 1.0]
        """
        ids = self.numbers(tokens)
        gathered = self._gather(ids, kind)
        place = None
        if positions is not None:
            place = torch.as_tensor(positions, dtype=torch.float64)
            if place.shape != gathered.shape:
                expected = tuple(gathered.shape)
                raise ValueError(
                    f"positions must be (words of the sequence, vocabulary) {expected}, got {tuple(place.shape)}"
                )
            gathered = gathered + place @ self.dense(kind)
        found = algebra.project(gathered, ids, place, normed)
        named = [self.vocabulary[at] for at in ids.tolist()]
        facts = provenance(matrix=kind, positions=positions is not None, normed=normed, window=self.window)
        facts["tensors"] = {"counts": digest(self._counts)}
        return Projection(tokens=named, vocabulary=self.vocabulary, provenance=facts, **plain(found._asdict()))

    def _gather(self, ids: Int[Tensor, " R"], kind: str) -> Float[Tensor, "R words"]:
        """Rows of the matrix, without all others."""
        values, made = self.values(kind), torch.zeros(len(ids), len(self), dtype=torch.float64)
        for row, word in enumerate(ids.tolist()):
            there = slice(*self._starts[word : word + 2])
            made[row, torch.from_numpy(self._columns[there])] = values[there]
        return made

    def numbers(self, tokens: Any) -> Int[Tensor, " R"]:
        """The places in the vocabulary of a text's words, of words, or of numbers that are such places.

        >>> kq.Cooccurrence(torch.ones(2, 2), ["tea", "cup"]).numbers("Cup tea")
        tensor([1, 0])
        """
        if isinstance(tokens, str):
            tokens = words_in(tokens) if self._tokenizer is None else encoded(self._tokenizer, tokens)
        given = tokens.tolist() if isinstance(tokens, (Tensor, ndarray)) else list(tokens)
        if not given:
            raise ValueError("tokens must hold at least one word, got none")
        found = [self._at.get(one, -1) if isinstance(one, str) else int(one) for one in given]
        for one, place in zip(given, found, strict=True):
            if not 0 <= place < len(self):
                raise ValueError(f"tokens must be in the vocabulary of {len(self):,} words, and {one!r} is not")
        return torch.tensor(found)

    def form(self, kind: str = "ppmi", rank: int | None = None, heads: int | None = None) -> Form:
        """The directed form W_Q W_Kᵀ: the nearest of a rank to PPMI or log(1 + X), by truncated SVD.

        With `heads`, pieces of that rank that add up to the nearest of rank heads·rank, as a batch.

        >>> kq.Cooccurrence(torch.tensor([[0, 3, 1], [1, 0, 0], [1, 0, 0]])).form("log", rank=2)
        Form(r=2, d=3, float64, symmetry 0.86, effective rank 1.9)
        """
        matrix = self.dense(kind)
        return algebra.truncated(matrix, rank) if heads is None else algebra.dealt(matrix, heads, rank)

    def symmetry(self, kind: str = "counts") -> float:
        """tr(X²)/‖X‖² of the counts, their log(1 + X), or PPMI: what the corpus itself is, 1 symmetric, −1 skew.

        >>> kq.Cooccurrence.from_text("a b c", window=2).symmetry()
        0.0
        """
        values = self.values(kind).numpy()
        keys, other = (self._rows << 32) | self._columns, (self._columns << 32) | self._rows
        at = np.searchsorted(keys, other).clip(max=max(len(keys) - 1, 0))
        energy = float(values @ values)
        return float((values * values[at] * (keys[at] == other)).sum() / energy) if energy else 0.0


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text by a tokenizer of transformers, nothing added, or by keyquery's own."""
    if hasattr(tokenizer, "num_special_tokens_to_add"):
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return list(tokenizer(text)["input_ids"])


def _tokens_of(tokenizer: Any) -> list[str]:
    """Every token as it is stored, by its id; where one has no name, or another's, its number."""
    found: dict[str, int] = {}
    for number, word in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        found[f"#{number}" if word is None or word in found else word] = number
    return list(found)


def _require_words(tally: Tally) -> None:
    seen = np.flatnonzero(tally.frequency())
    if len(seen) == 0:
        raise ValueError("texts hold no words" + (" of the vocabulary" if tally.words else ""))
    if len(seen) == 1:
        raise ValueError(f"texts must hold at least two different words, got only {tally.words[int(seen[0])]!r}")
    if not len(tally.pairs()[0]):
        raise ValueError("no two words of the texts stand in one text, within the window")


def _checked(matrix: Any) -> Float[ndarray, "n n"]:
    """A matrix of counts in float64; whatever it cannot be is told in one sentence."""
    try:
        given = np.asarray(matrix.detach().cpu() if isinstance(matrix, Tensor) else matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError("matrix must hold numbers, in rows of equal length") from None
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise ValueError(f"matrix must be square, words by words, got {given.shape}")
    if not np.isfinite(given).all():
        raise ValueError(f"matrix must be finite, got {int((~np.isfinite(given)).sum())} NaN or infinite counts")
    if given.size and given.min() < 0:
        at = np.unravel_index(given.argmin(), given.shape)
        raise ValueError(f"matrix must hold counts, at least 0, got {given[at]:g} in row {at[0]}, column {at[1]}")
    return given
