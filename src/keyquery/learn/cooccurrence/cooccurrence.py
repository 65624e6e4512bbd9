"""`Cooccurrence`: word co-occurrence counts, PPMI, and the attention that follows from them.

After "Self-Attention as Distributional Projection" (2025), with directed counts in addition to symmetric ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array
from torch import Tensor

from keyquery.forms import Form
from keyquery.learn.cooccurrence.tally import CHUNK, Tally, read_into, tokens_of, words_in
from keyquery.listening.inputs.batches import encoded
from keyquery.reading import Reading, digest, provenance
from keyquery.support.checks import check_choice, check_count, check_float, check_number
from keyquery.support.progress import Progress, silent

KINDS = ("counts", "log", "ppmi")
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
        ranked = sorted(zip(self.vocabulary, self.e, strict=True), key=lambda pair: -pair[1])
        return [word for word, _ in ranked if word not in self.tokens][:count]

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

    Examples
    --------
    >>> x = kq.Cooccurrence(torch.tensor([[0, 3, 1], [1, 0, 0], [1, 0, 0]]), ["tea", "cup", "pot"])
    >>> x
    Cooccurrence(3 words, 6 pairs seen, 4 different, directed)
    >>> x.symmetric().dense()[0]
    tensor([0., 4., 2.], dtype=torch.float64)
    """

    tokens: int | None = None  # of the texts
    window: int | None = None
    _tokenizer: Any = None

    def __init__(self, matrix: Any, vocabulary: Sequence[str] | None = None) -> None:
        counts = csr_array(_checked(matrix))
        words = list(map(str, range(counts.shape[0]))) if vocabulary is None else list(vocabulary)
        if len(words) != counts.shape[0]:
            size = counts.shape[0]
            raise ValueError(f"vocabulary must have one word per row of the matrix, {size}, got {len(words)}")
        self._fill(counts, words)

    @classmethod
    def from_text(
        cls,
        texts: Any,
        window: int = WINDOW,
        directed: bool = True,
        vocabulary: Sequence[str] | None = None,
        tokenizer: Any = None,
        progress: Progress | None = None,
    ) -> Cooccurrence:
        """Count a text: a string, a `pathlib.Path` to a text file (compressed or not), or several of these.

        X[i, j] counts how often j occurs at most `window` positions after i in the same text; without `directed`,
        before or after. Files are streamed. Words are in lower case, by falling frequency; or only those of
        `vocabulary`, where others keep their positions; or the tokens of a `tokenizer`. Default: window 5, directed.

        >>> kq.Cooccurrence.from_text("A rose is a rose is a rose.", window=2)
        Cooccurrence(4 words, 15 pairs seen, 8 different, directed)
        """
        check_count("window", window, least=1)
        if tokenizer is not None and vocabulary is not None:
            raise ValueError("pass either vocabulary or tokenizer: a tokenizer has its own")
        if tokenizer is None:
            tally = Tally(window, vocabulary)
        else:
            tally = Tally(window, tokens_of(tokenizer), lambda text: encoded(tokenizer, text))
        read_into(tally, texts, progress or silent)
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
        keys, numbers = tally.pairs()
        if not len(keys):
            raise ValueError("texts hold no two words of the vocabulary within the window of each other")
        size, frequency = len(tally.words), tally.frequency().astype(float)
        counts = csr_array((numbers.astype(np.float64), (keys >> 32, keys & LOW)), shape=(size, size))
        whole = cls.__new__(cls)
        whole.tokens, whole.window, whole._tokenizer = tally.tokens, tally.window, tokenizer
        whole._fill(counts, tally.words, frequency)
        if not tally.open:
            return whole
        order = sorted(range(size), key=lambda word: (-whole.frequency[word], whole.vocabulary[word]))
        return whole.only(np.array(order))

    def _fill(self, counts: csr_array, words: Sequence[str], frequency: Float[ndarray, " words"] | None = None) -> None:
        if len(words) < 2:
            raise ValueError(f"a vocabulary must have at least two words, got {len(words)}")
        self._index = {word: number for number, word in enumerate(words)}
        if len(self._index) != len(words):
            twice = next(word for word in words if list(words).count(word) > 1)
            raise ValueError(f"vocabulary must not contain duplicates, got {twice!r} twice")
        counts.sort_indices()
        self._counts, self.vocabulary = counts, list(words)
        self.row_sums, self.column_sums = counts.sum(1), counts.sum(0)
        self.frequency = self.row_sums + self.column_sums if frequency is None else frequency

    def __len__(self) -> int:
        return len(self.vocabulary)

    def __repr__(self) -> str:
        way = "directed" if self.directed else "symmetric"
        seen = f"{self.total:,.10g} pairs seen, {self._counts.nnz:,} different"
        return f"Cooccurrence({len(self):,} words, {seen}, {way})"

    @property
    def total(self) -> float:
        """ΣX."""
        return float(self._counts.sum())

    @property
    def directed(self) -> bool:
        """Whether X ≠ Xᵀ."""
        return bool((self._counts != self._counts.T).nnz)

    def symmetric(self) -> Cooccurrence:
        """X + Xᵀ of a directed X: co-occurrence counts in either order."""
        return self._like(csr_array(self._counts + self._counts.T), self.vocabulary, self.frequency)

    def most(self, count: int) -> Cooccurrence:
        """Restrict to the `count` most frequent words.

        >>> kq.Cooccurrence.from_text("a rose is a rose is a rose").most(2).vocabulary
        ['a', 'rose']
        """
        check_count("count", count, least=2, most=len(self))
        return self.only(np.sort(np.argsort(-self.frequency, kind="stable")[:count]))

    def only(self, rows: Int[ndarray, " kept"]) -> Cooccurrence:
        """Restrict to these words, in the order given."""
        return self._like(self._counts[rows][:, rows], [self.vocabulary[row] for row in rows], self.frequency[rows])

    def _like(self, counts: csr_array, words: list[str], frequency: Float[ndarray, " words"]) -> Cooccurrence:
        new = copy.copy(self)
        new._fill(counts, words, frequency)
        return new

    def _matrix(self, kind: str) -> csr_array:
        """X, log(1 + X) or PPMI."""
        check_choice("kind", kind, KINDS)
        counts = self._counts
        if kind != "ppmi":
            return counts.log1p() if kind == "log" else counts
        rows, columns = counts.nonzero()
        expected = self.row_sums[rows] * self.column_sums[columns] / self.total
        values = np.log(counts.data / expected).clip(min=0.0)
        return csr_array((values, counts.indices, counts.indptr), counts.shape)

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
            raise ValueError(f"a dense matrix of {len(self):,} words is too large: use .most({DENSE})")
        if kind == "log" and smooth != 1:
            return (self.dense() + smooth).log()
        return torch.from_numpy(self._matrix(kind).toarray())

    def project(self, tokens: Any, kind: str = "counts") -> Projection:
        """M = QSQᵀ, Norm(M), E = M(QS), e = mean E and p = softmax(e) of a sequence; S is X transformed by `kind`.

        `tokens` is a text, words or indices, whose rows Q selects.

        >>> s = kq.Cooccurrence(torch.tensor([[0, 2, 1], [2, 0, 0], [1, 0, 0]]), ["tea", "cup", "pot"])
        >>> s.project("tea cup").e
        [2.0, 2.0, 1.0]
        """
        ids = self.numbers(tokens)
        gathered = torch.from_numpy(self._matrix(kind)[ids.numpy()].toarray())
        m = gathered[:, ids]  # (QS)Qᵀ
        projection = m @ gathered
        e = projection.mean(0)
        return Projection(
            tokens=[self.vocabulary[word] for word in ids.tolist()],
            M=m.tolist(),
            norm=normed_rows(m).tolist(),
            E=projection.tolist(),
            e=e.tolist(),
            p=e.softmax(0).tolist(),
            vocabulary=self.vocabulary,
            provenance=provenance(matrix=kind, window=self.window, tensors={"counts": digest(self._counts.data)}),
        )

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
        indices = [self._index.get(word, -1) if isinstance(word, str) else int(word) for word in words]
        for word, index in zip(words, indices, strict=True):
            if not 0 <= index < len(self):
                raise ValueError(f"tokens must be in the vocabulary of {len(self):,} words, and {word!r} is not")
        return torch.tensor(indices)

    def form(self, kind: str = "ppmi", rank: int | None = None) -> Form:
        """A Form W_Q W_Kᵀ: the best low-rank approximation of PPMI or log(1 + X), by truncated SVD.

        >>> kq.Cooccurrence(torch.tensor([[0, 3, 1], [1, 0, 0], [1, 0, 0]])).form("log", rank=2)
        Form(r=2, d=3, float64, symmetry 0.86, effective rank 1.9)
        """
        return dealt(self.dense(kind), 1, rank)[0]

    def symmetry(self, kind: str = "counts") -> float:
        """tr(X²)/‖X‖² of the counts, log(1 + X) or PPMI: 1 symmetric, −1 skew.

        >>> kq.Cooccurrence.from_text("a b c", window=2).symmetry()
        0.0
        """
        matrix = self._matrix(kind)
        energy = float(matrix.multiply(matrix).sum())
        return float(matrix.multiply(matrix.T).sum()) / energy if energy else 0.0


def normed_rows(m: Float[Tensor, "... R R"]) -> Float[Tensor, "... R R"]:
    """M_rs / Σ_t M_rt; a row without any counts stays 0."""
    sums = m.sum(-1, keepdim=True)
    return m / torch.where(sums == 0, 1.0, sums)


def dealt(matrix: Float[Tensor, "n n"], heads: int, rank: int | None = None) -> Form:
    """A matrix split into heads of rank r that sum to its nearest form of rank heads·r: a Form with batch (heads,).

    No form of that rank is nearer (Eckart–Young). Singular values are assigned to heads in turn, so that no head has
    all of the large ones.
    """
    size = len(matrix)
    check_float("matrix", matrix, "n n", n=size)
    check_count("heads", heads, least=1, most=size)
    check_count("rank", rank, least=1, most=size // heads, optional=True)
    count = heads * (size // heads if rank is None else rank)
    u, values, v = torch.linalg.svd(matrix.double())
    root = values[:count].sqrt()
    query, key = ((part * root).mT.unflatten(0, (-1, heads)).transpose(0, 1) for part in (u[:, :count], v[:count].mT))
    return Form(query.to(matrix.dtype).contiguous(), key.to(matrix.dtype).contiguous())


def _checked(matrix: Any) -> Float[ndarray, "n n"]:
    """A validated matrix of counts, float64."""
    try:
        counts = np.asarray(matrix.detach().cpu() if isinstance(matrix, Tensor) else matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError("matrix must contain numbers, in rows of equal length") from None
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        raise ValueError(f"matrix must be square, words by words, got {counts.shape}")
    if (wrong := counts[~(np.isfinite(counts) & (counts >= 0))]).size:
        raise ValueError(f"matrix must contain finite, non-negative counts, got {wrong[0]:g}")
    return counts
