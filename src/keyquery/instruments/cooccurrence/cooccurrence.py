"""`Cooccurrence`: word co-occurrence counts, PPMI, and the attention that follows from them."""

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
from keyquery.instruments.cooccurrence import counts as algebra
from keyquery.instruments.cooccurrence.counts import KINDS
from keyquery.instruments.cooccurrence.tally import CHUNK, Tally, read_into, require_words, tokens_of, words_in
from keyquery.listening.inputs.encoding import encoded
from keyquery.reading import Reading, digest, plain, provenance
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.progress import Progress, bars

WINDOW = 5  # default distance up to which two words are a pair
DENSE = 20_000  # largest vocabulary for a dense matrix
LOW = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Projection(Reading, kind="projection"):
    """The projection of a sequence onto the vocabulary."""

    units: ClassVar[Mapping[str, str]] = {
        "M": "QSQᵀ, between the words of the sequence",
        "norm": "M with rows normalised to sum 1",
        "E": "M(QS), words of the sequence by words of the vocabulary",
        "e": "mean of E's rows",
        "p": "softmax of e",
    }

    tokens: list[str]  # words of the sequence
    M: list[list[float]]
    norm: list[list[float]]
    E: list[list[float]]
    e: list[float]
    p: list[float]
    vocabulary: list[str]  # all words

    def best(self, count: int = 5) -> list[str]:
        """The words with the highest e, excluding those of the sequence.

        >>> s = kq.Cooccurrence(torch.tensor([[0, 2, 1], [2, 0, 4], [1, 4, 0]]), ["tea", "cup", "pot"])
        >>> s.project("cup").best(1)
        ['tea']
        """
        ranked = sorted(range(len(self.e)), key=lambda place: -self.e[place])
        return [self.vocabulary[at] for at in ranked if self.vocabulary[at] not in self.tokens][:count]

    def records(self) -> list[dict[str, Any]]:
        """One row per word of the vocabulary: its e and p."""
        return [{"word": word, "e": e, "p": p} for word, e, p in zip(self.vocabulary, self.e, self.p, strict=True)]


class Cooccurrence:
    """Sparse co-occurrence counts X: X[i, j] counts word j after word i, or near it.

    Parameters
    ----------
    matrix
        A square matrix of non-negative counts. For counts of texts, see `from_text`.
    vocabulary
        One word per row. Default: row numbers.

    Attributes
    ----------
    directed
        Whether X ≠ Xᵀ.

    Raises
    ------
    TypeError, ValueError
        If the matrix is not square, finite and non-negative, or the vocabulary does not fit it.

    Examples
    --------
    >>> x = kq.Cooccurrence(torch.tensor([[0, 3, 1], [1, 0, 0], [1, 0, 0]]), ["tea", "cup", "pot"])
    >>> x
    Cooccurrence(3 words, 6 pairs seen, 4 different, directed)
    >>> x.symmetric().dense()[0]
    tensor([0., 4., 2.], dtype=torch.float64)

    See Also
    --------
    look : Compares heads with a corpus (`corpus=`).
    """

    def __init__(self, matrix: Any, vocabulary: Sequence[str] | None = None) -> None:
        dense = _checked(matrix)
        rows, columns = dense.nonzero()
        words = [str(number) for number in range(len(dense))] if vocabulary is None else list(vocabulary)
        if len(words) != len(dense):
            raise ValueError(f"vocabulary must have one word per row of the matrix, {len(dense)}, got {len(words)}")
        self._fill(rows, columns, dense[rows, columns], words)

    @classmethod
    def from_text(
        cls,
        texts: Any,
        window: int = WINDOW,
        directed: bool = True,
        vocabulary: Sequence[str] | None = None,
        tokenizer: Any = None,
        verbose: bool = False,
        progress: Progress | None = None,
    ) -> Cooccurrence:
        """Count a text: a string, a `pathlib.Path` to a text file (compressed or not), or several of these.

        X[i, j] counts how often j occurs at most `window` positions after i in the same text; without `directed`,
        before or after. Files are streamed. Words are those of `words_in`, in lower case, by falling frequency; or only
        those of `vocabulary`, where others keep their positions; or the tokens of a `tokenizer`. `verbose` shows a
        progress bar, `progress` is your own. Default: window 5, directed.

        >>> kq.Cooccurrence.from_text("A rose is a rose is a rose.", window=2)
        Cooccurrence(4 words, 15 pairs seen, 8 different, directed)
        """
        check_count("window", window, least=1)
        if tokenizer is not None and vocabulary is not None:
            raise ValueError("pass either vocabulary or tokenizer: a tokenizer has its own")
        words = tokens_of(tokenizer) if tokenizer is not None else vocabulary
        encode = None if tokenizer is None else lambda text: encoded(tokenizer, text)
        tally = Tally(window, words, encode)
        with bars(verbose) as watch:
            read_into(tally, texts, progress or watch)
        counts = cls._of(tally, tokenizer)
        return counts if directed else counts.symmetric()

    @classmethod
    def from_ids(cls, ids: Any, vocabulary: Sequence[str], window: int = WINDOW) -> Cooccurrence:
        """Directed counts of one text of word ids; negative ids keep their position but are not counted.

        >>> kq.Cooccurrence.from_ids([0, 1, 0, 1], ["tick", "tock"], window=1).dense()
        tensor([[0., 2.],
                [1., 0.]], dtype=torch.float64)
        """
        check_count("window", window, least=1)
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(f"ids must be a list of integers, got shape {array.shape} of {array.dtype}")
        if array.size and array.max() >= len(vocabulary):
            raise ValueError(f"ids must be below the vocabulary size, {len(vocabulary)}, got {array.max()}")
        tally = Tally(window, vocabulary)
        for start in range(0, len(array), CHUNK):
            tally.take(array[start : start + CHUNK].astype(np.int64))
        return cls._of(tally)

    @classmethod
    def _of(cls, tally: Tally, tokenizer: Any = None) -> Cooccurrence:
        require_words(tally)
        keys, counts = tally.pairs()
        rows, columns = keys >> 32, keys & LOW
        frequency, words = tally.frequency().astype(np.float64), tally.words
        if tally.open:
            order = sorted(range(len(words)), key=lambda at: (-frequency[at], words[at]))
            place = np.empty(len(order), dtype=np.int64)
            place[order] = np.arange(len(order))
            rows, columns, frequency = place[rows], place[columns], frequency[order]
            words = [words[at] for at in order]
        new = cls.__new__(cls)
        new._fill(rows, columns, counts.astype(np.float64), words, frequency, tally.tokens, tally.window, tokenizer)
        return new

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
            raise ValueError(f"vocabulary must not contain duplicates, got {twice!r} twice")
        order = ((rows << 32) | columns).argsort()
        self._rows, self._columns, self._counts = rows[order], columns[order], counts[order]
        self._starts = np.searchsorted(self._rows, np.arange(size + 1))
        self.vocabulary = list(words)
        self.tokens = tokens
        self.window = window
        self._tokenizer = tokenizer
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
        alike = all(bool((first == second[other]).all()) for first, second in pairs)
        return not (alike and bool((self._counts == self._counts[other]).all()))

    def reversed(self) -> Cooccurrence:
        """Xᵀ: the counts of the reversed texts.

        >>> bool((kq.Cooccurrence.from_text("a b c").reversed().dense() == torch.ones(3, 3).tril(-1)).all())
        True
        """
        return self._like(self._columns, self._rows, self._counts)

    def symmetric(self) -> Cooccurrence:
        """X + Xᵀ of a directed X: co-occurrence counts in either order."""
        keys = np.concatenate(((self._rows << 32) | self._columns, (self._columns << 32) | self._rows))
        unique, back = np.unique(keys, return_inverse=True)
        counts = np.bincount(back, np.concatenate((self._counts, self._counts)), len(unique))
        return self._like(unique >> 32, unique & LOW, counts)

    def most(self, count: int) -> Cooccurrence:
        """Restrict to the `count` most frequent words.

        >>> kq.Cooccurrence.from_text("a rose is a rose is a rose").most(2).vocabulary
        ['a', 'rose']
        """
        check_count("count", count, least=2, most=len(self))
        kept = np.sort(np.argsort(-self.frequency, kind="stable")[:count])
        return self.only(kept)

    def only(self, places: Int[ndarray, " kept"]) -> Cooccurrence:
        """Restrict to these words, in the order given."""
        to = np.full(len(self), -1, dtype=np.int64)
        to[places] = np.arange(len(places))
        kept = (to[self._rows] >= 0) & (to[self._columns] >= 0)
        words = [self.vocabulary[at] for at in places]
        rows, columns = to[self._rows[kept]], to[self._columns[kept]]
        new = Cooccurrence.__new__(Cooccurrence)
        new._fill(rows, columns, self._counts[kept], words, self.frequency[places], self.tokens, self.window)
        return new

    def _like(self, rows: Any, columns: Any, counts: Any) -> Cooccurrence:
        new = Cooccurrence.__new__(Cooccurrence)
        facts = (self.vocabulary, self.frequency, self.tokens, self.window, self._tokenizer)
        new._fill(rows, columns, counts, *facts)
        return new

    def values(self, kind: str = "counts") -> Float[Tensor, " pairs"]:
        """Values of the observed pairs: count, log(1 + count), or PPMI."""
        check_choice("kind", kind, KINDS)
        counts = torch.from_numpy(self._counts)
        if kind == "counts":
            return counts
        if kind == "log":
            return algebra.log_counts(counts)
        sums = (torch.from_numpy(self.row_sums[self._rows]), torch.from_numpy(self.column_sums[self._columns]))
        return algebra.ppmi(counts, *sums, self.total)

    def dense(self, kind: str = "counts", smooth: float = 1.0) -> Float[Tensor, "words words"]:
        """X, log(X + smooth) or PPMI as a dense matrix, float64. With smooth = 0, unseen pairs are −∞.

        >>> x = kq.Cooccurrence(torch.tensor([[0, 4], [4, 0]]))
        >>> x.dense("log", smooth=0)
        tensor([[  -inf, 1.3863],
                [1.3863,   -inf]], dtype=torch.float64)
        """
        check_number("smooth", smooth)
        if smooth < 0:
            raise ValueError(f"smooth must be at least 0, got {smooth}")
        if len(self) > DENSE:
            raise ValueError(
                f"a dense matrix of {len(self):,} words is too large: use the most frequent, .most({DENSE})"
            )
        matrix = torch.zeros(len(self), len(self), dtype=torch.float64)
        at = torch.from_numpy(self._rows), torch.from_numpy(self._columns)
        if kind == "log" and smooth != 1:
            matrix[at] = torch.from_numpy(self._counts)
            return algebra.log_counts(matrix, smooth)
        matrix[at] = self.values(kind)
        return matrix

    def project(self, tokens: Any, kind: str = "counts", positions: Any = None, normed: bool = False) -> Projection:
        """M = QSQᵀ, Norm(M), E = M(QS), e = mean E and p = softmax(e) of a sequence; S is X transformed by `kind`.

        `tokens` is a text, words or indices. `positions` P (R, n) is added to the selector Q. With `normed`, E is
        Norm(M)(QS): with raw counts, p is nearly one-hot.

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
        projected = algebra.project(gathered, ids, place, normed)
        named = [self.vocabulary[at] for at in ids.tolist()]
        facts = provenance(matrix=kind, positions=positions is not None, normed=normed, window=self.window)
        facts["tensors"] = {"counts": digest(self._counts)}
        return Projection(tokens=named, vocabulary=self.vocabulary, provenance=facts, **plain(projected._asdict()))

    def _gather(self, ids: Int[Tensor, " R"], kind: str) -> Float[Tensor, "R words"]:
        """Some rows of the matrix, dense."""
        values, gathered = self.values(kind), torch.zeros(len(ids), len(self), dtype=torch.float64)
        for row, word in enumerate(ids.tolist()):
            entries = slice(*self._starts[word : word + 2])
            gathered[row, torch.from_numpy(self._columns[entries])] = values[entries]
        return gathered

    def numbers(self, tokens: Any) -> Int[Tensor, " R"]:
        """Vocabulary indices of a text, of a list of words, or of indices.

        >>> kq.Cooccurrence(torch.ones(2, 2), ["tea", "cup"]).numbers("Cup tea")
        tensor([1, 0])
        """
        if isinstance(tokens, str):
            tokens = words_in(tokens) if self._tokenizer is None else encoded(self._tokenizer, tokens)
        words = tokens.tolist() if isinstance(tokens, (Tensor, ndarray)) else list(tokens)
        if not words:
            raise ValueError("tokens must contain at least one word, got none")
        indices = [self._at.get(word, -1) if isinstance(word, str) else int(word) for word in words]
        for word, index in zip(words, indices, strict=True):
            if not 0 <= index < len(self):
                raise ValueError(f"tokens must be in the vocabulary of {len(self):,} words, and {word!r} is not")
        return torch.tensor(indices)

    def form(self, kind: str = "ppmi", rank: int | None = None, heads: int | None = None) -> Form:
        """A Form W_Q W_Kᵀ: the best low-rank approximation of PPMI or log(1 + X), by truncated SVD.

        With `heads`, a batch of forms of that rank, which sum to the best approximation of rank heads·rank.

        >>> kq.Cooccurrence(torch.tensor([[0, 3, 1], [1, 0, 0], [1, 0, 0]])).form("log", rank=2)
        Form(r=2, d=3, float64, symmetry 0.86, effective rank 1.9)
        """
        matrix = self.dense(kind)
        return algebra.dealt(matrix, 1, rank)[0] if heads is None else algebra.dealt(matrix, heads, rank)

    def symmetry(self, kind: str = "counts") -> float:
        """tr(X²)/‖X‖² of the counts, log(1 + X) or PPMI: 1 symmetric, −1 skew.

        >>> kq.Cooccurrence.from_text("a b c", window=2).symmetry()
        0.0
        """
        values = self.values(kind).numpy()
        keys, other = (self._rows << 32) | self._columns, (self._columns << 32) | self._rows
        at = np.searchsorted(keys, other).clip(max=max(len(keys) - 1, 0))
        energy = float(values @ values)
        return float((values * values[at] * (keys[at] == other)).sum() / energy) if energy else 0.0


def _checked(matrix: Any) -> Float[ndarray, "n n"]:
    """A validated matrix of counts, float64."""
    try:
        counts = np.asarray(matrix.detach().cpu() if isinstance(matrix, Tensor) else matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError("matrix must contain numbers, in rows of equal length") from None
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        raise ValueError(f"matrix must be square, words by words, got {counts.shape}")
    if not np.isfinite(counts).all():
        raise ValueError(f"matrix must be finite, got {int((~np.isfinite(counts)).sum())} NaN or infinite counts")
    if counts.size and counts.min() < 0:
        at = np.unravel_index(counts.argmin(), counts.shape)
        raise ValueError(f"matrix must contain non-negative counts, got {counts[at]:g} in row {at[0]}, column {at[1]}")
    return counts
