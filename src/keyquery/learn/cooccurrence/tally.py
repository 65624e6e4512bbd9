"""Streaming counts of word pairs: memory grows with the number of distinct pairs, not with the texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from keyquery.listening.inputs.word_pieces import WORD
from keyquery.support.files import count_pieces, text_pieces
from keyquery.support.progress import Progress

CHUNK = 2**16  # tokens counted at a time
LETTERS = 2**16  # characters scanned at a time, and largest length of an unfinished word
HOLE = -1  # a token that is not counted, but keeps its position
Pairs = tuple[Int[ndarray, " pairs"], Int[ndarray, " pairs"]]


def words_in(text: str) -> list[str]:
    """The words of a text in lower case: runs of letters and digits, and runs of other characters."""
    return WORD.findall(text.lower())


class Tally:
    """Counts of words and of directed pairs within a window; windows do not cross texts.

    Words are those of `words_in`, all or of a vocabulary; or token ids from `encode(text)`.
    """

    def __init__(self, window: int, vocabulary: Sequence[str] | None = None, encode: Any = None) -> None:
        self.window, self.words = window, list(vocabulary or [])
        self.tokens = 0
        self.open, self._encode = vocabulary is None, encode  # open: the vocabulary grows
        self._known = {word: number for number, word in enumerate(self.words)}
        self._rest, self._text = "", 0
        self._waiting = [np.zeros((2, 0), dtype=np.int64)]  # tokens, and the index of the text of each
        self._old = 0  # the first of them, which are counted already
        self._runs: list[Pairs] = []  # sorted, each at least twice as long as the next
        self._seen = np.zeros(0, dtype=np.int64)

    def add(self, piece: str) -> None:
        """Add to the current text; an unfinished word is buffered, up to `LETTERS` characters."""
        for start in range(0, len(piece), LETTERS):
            text = self._rest + piece[start : start + LETTERS]
            last = max(text.rfind(sign) for sign in " \n\t")
            end = len(text[:last].rstrip()) if last >= 0 else 0  # whitespace belongs to the following word
            if not end and len(text) >= LETTERS:  # a single word, or whitespace only
                end = last + 1 or len(text)
            self._rest = text[end:]
            self.take(self._ids(text[:end]))

    def end(self) -> None:
        """End the current text."""
        self.take(self._ids(self._rest))
        self._rest, self._text = "", self._text + 1

    def take(self, ids: Int[ndarray, " n"]) -> None:
        """Add token ids to the current text."""
        self.tokens += len(ids)
        self._waiting.append(np.stack((ids, np.full(len(ids), self._text, dtype=np.int64))))
        if sum(part.shape[1] for part in self._waiting) - self._old >= CHUNK:
            self._count()

    def pairs(self) -> Pairs:
        """Sorted keys a·2³² + b, and the count of each."""
        self._count()
        while len(self._runs) > 1:
            self._runs.append(_merged(self._runs.pop(), self._runs.pop()))
        return self._runs[0]

    def frequency(self) -> Int[ndarray, " words"]:
        """Count of each word."""
        self._count()
        return np.pad(self._seen, (0, max(len(self.words) - len(self._seen), 0)))[: len(self.words)]

    def _ids(self, text: str) -> Int[ndarray, " n"]:
        if self._encode is not None:
            return np.asarray(self._encode(text), dtype=np.int64)
        words = words_in(text)
        if self.open:
            new = set(words) - self._known.keys()
            self._known.update(zip(new, range(len(self.words), len(self.words) + len(new)), strict=True))
            self.words += new
            return np.fromiter(map(self._known.__getitem__, words), np.int64, len(words))
        return np.fromiter((self._known.get(word, HOLE) for word in words), np.int64, len(words))

    def _count(self) -> None:
        """Count the pending tokens, and merge runs of similar length."""
        ids, texts = both = np.concatenate(self._waiting, axis=1)
        run = _pairs_of(ids, texts, self.window, self._old)
        new = ids[self._old :]
        seen = np.bincount(new[new >= 0], minlength=len(self._seen))
        seen[: len(self._seen)] += self._seen
        self._seen, self._old = seen, min(self.window, len(ids))
        self._waiting = [both[:, len(ids) - self._old :].copy()]
        while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
            run = _merged(self._runs.pop(), run)
        self._runs.append(run)


def _pairs_of(ids: Int[ndarray, " tokens"], texts: Int[ndarray, " tokens"], window: int, old: int) -> Pairs:
    """How often word b occurs at most `window` positions after word a in one text, as keys a·2³² + b and their counts.

    Tokens below 0 are skipped, and pairs whose second token is among the first `old` are not counted again.
    """
    runs = [np.zeros(0, dtype=np.int64)]
    for offset in range(1, min(window, len(ids) - 1) + 1):
        start = max(old - offset, 0)
        first, second = ids[start : len(ids) - offset], ids[start + offset :]
        kept = (texts[start : len(ids) - offset] == texts[start + offset :]) & (first >= 0) & (second >= 0)
        runs.append(((first << 32) | second)[kept])
    return np.unique(np.concatenate(runs), return_counts=True)


def _merged(first: Pairs, second: Pairs) -> Pairs:
    """Two sorted lists of keys and counts as one, the counts of equal keys added."""
    keys = np.concatenate((first[0], second[0]))
    order = keys.argsort(kind="stable")  # two sorted runs: linear
    keys, counts = keys[order], np.concatenate((first[1], second[1]))[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(counts, starts)


def read_into(tally: Tally, texts: Any, watch: Progress) -> None:
    """Add texts to a tally: a string, a Path to a text file (compressed or not), or several of these."""
    sources = [texts] if isinstance(texts, (str, Path)) else texts
    if not isinstance(sources, Iterable):
        raise TypeError(f"texts must be a string, a pathlib.Path, or several of these, got {type(texts).__name__}")
    steps: Iterable[None] = _steps(tally, sources)
    if isinstance(sources, Sequence):
        total = sum(count_pieces(source) if isinstance(source, Path) else 1 for source in sources)
        steps = watch(steps, "counting", total)
    for _ in steps:
        pass


def _steps(tally: Tally, texts: Iterable[str | Path]) -> Iterator[None]:
    """One step per chunk of a file, or per text."""
    for text in texts:
        if not isinstance(text, (str, Path)):
            raise TypeError(f"texts must contain strings or pathlib.Paths, got {type(text).__name__}")
        if isinstance(text, str) and len(text) < 256 and "\0" not in text and Path(text).is_file():
            raise ValueError(f"texts: {text} is a file; pass pathlib.Path({text!r})")
        for piece in text_pieces(text) if isinstance(text, Path) else (text,):
            tally.add(piece)
            yield
        tally.end()


def tokens_of(tokenizer: Any) -> list[str]:
    """Every token by its id; unnamed and duplicate tokens are named by their number."""
    numbers: dict[str, int] = {}
    for number, word in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        numbers[f"#{number}" if word is None or word in numbers else word] = number
    return list(numbers)
