"""Pairs of words counted while texts stream by: memory grows with the pairs that differ, not with the texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from keyquery.capture.word_pieces import WORD
from keyquery.forms.counts import count_pairs, merge_pairs
from keyquery.support.files import count_pieces, text_pieces
from keyquery.support.progress import Progress

CHUNK = 2**16  # tokens that are counted at a time
LETTERS = 2**16  # of a text that are looked through at a time, and of a word that may wait for its end
HOLE = -1  # a token that is not counted, and keeps its place
Pairs = tuple[Int[ndarray, " pairs"], Int[ndarray, " pairs"]]


def words_in(text: str) -> list[str]:
    """The words of a text, in lower case: runs of letters and digits, and runs of other signs.

    >>> words_in("The river’s bank, flooded.")
    ['the', 'river’s', 'bank', ',', 'flooded', '.']
    """
    return WORD.findall(text.lower())


class Tally:
    """Counts of words and of directed pairs within a window; windows never reach from one text into another.

    >>> tally = Tally(window=1)
    >>> for piece in ("a rose is a ro", "se"):
    ...     tally.add(piece)
    >>> tally.end()
    >>> keys, counts = tally.pairs()
    >>> sorted(tally.words), sorted(counts.tolist())
    (['a', 'is', 'rose'], [1, 1, 2])
    """

    def __init__(self, window: int, vocabulary: Sequence[str] | None = None, encode: Any = None) -> None:
        """Words as `words_in` finds them, all or those of a vocabulary; or what `encode` makes of a text, numbers."""
        self.window, self.words = window, list(vocabulary or [])
        self.tokens = 0
        self.open, self._encode = vocabulary is None, encode  # open: it grows with what is read
        self._known = {word: number for number, word in enumerate(self.words)}
        self._rest, self._text = "", 0
        self._waiting: list[Int[ndarray, " n"]] = []
        self._carried = np.zeros((2, 0), dtype=np.int64)  # the last tokens before those that wait, and their texts
        self._runs: list[Pairs] = []  # sorted, each at least twice as long as the next
        self._seen = np.zeros(0, dtype=np.int64)

    def add(self, piece: str) -> None:
        """More of the text that is open; what may be half a word waits, up to `LETTERS` letters or blanks."""
        for start in range(0, len(piece), LETTERS):
            self._add(piece[start : start + LETTERS])

    def _add(self, piece: str) -> None:
        text = self._rest + piece
        long = len(text) >= LETTERS
        last = max(text.rfind(sign) for sign in " \n\t")
        end = len(text[:last].rstrip()) if last >= 0 else 0  # blanks go with the word behind them
        if not end and long:  # one word, or blanks without one
            end = last + 1 or len(text)
        self._rest = text[end:]
        self._take(text[:end])

    def end(self) -> None:
        """The text that is open ends here."""
        self._take(self._rest)
        self._rest, self._text = "", self._text + 1

    def take(self, ids: Int[ndarray, " n"]) -> None:
        """More of the text that is open, as numbers."""
        self.tokens += len(ids)
        self._waiting.append(np.stack((ids, np.full(len(ids), self._text, dtype=np.int64))))
        if sum(part.shape[1] for part in self._waiting) >= CHUNK:
            self._count()

    def pairs(self) -> Pairs:
        """Keys a·2³² + b in rising order, and how often each was seen."""
        self._count()
        while len(self._runs) > 1:
            self._runs.append(merge_pairs(self._runs.pop(), self._runs.pop()))
        return self._runs[0] if self._runs else (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def frequency(self) -> Int[ndarray, " words"]:
        """How often each word was seen."""
        self._count()
        return np.pad(self._seen, (0, max(len(self.words) - len(self._seen), 0)))[: len(self.words)]

    def _take(self, text: str) -> None:
        if text:
            self.take(self._ids(text))

    def _ids(self, text: str) -> Int[ndarray, " n"]:
        if self._encode is not None:
            return np.asarray(self._encode(text), dtype=np.int64)
        found = words_in(text)
        if self.open:
            new = set(found) - self._known.keys()
            self._known.update(zip(new, range(len(self.words), len(self.words) + len(new)), strict=True))
            self.words += new
            return np.fromiter(map(self._known.__getitem__, found), np.int64, len(found))
        return np.fromiter((self._known.get(word, HOLE) for word in found), np.int64, len(found))

    def _count(self) -> None:
        """Count what waits, and merge runs of about the same length."""
        if not self._waiting:
            return
        both = np.concatenate((self._carried, *self._waiting), axis=1)
        ids, texts = both
        run = count_pairs(ids, texts, self.window, old=self._carried.shape[1])
        new = ids[self._carried.shape[1] :]
        seen = np.bincount(new[new >= 0], minlength=len(self._seen))
        seen[: len(self._seen)] += self._seen
        self._seen, self._waiting = seen, []
        self._carried = both[:, max(both.shape[1] - self.window, 0) :].copy()
        while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
            run = merge_pairs(self._runs.pop(), run)
        self._runs.append(run)


def read_into(tally: Tally, texts: Any, watch: Progress) -> None:
    """Every text into a tally: a text, a Path to a file of one, packed or not, or several of these.

    >>> tally = Tally(window=2)
    >>> read_into(tally, ["a rose", "is a rose"], lambda items, what, total: items)
    >>> tally.tokens
    5
    """
    given = [texts] if isinstance(texts, (str, Path)) else texts
    if not isinstance(given, Iterable):
        raise TypeError(f"texts must be a text, a pathlib.Path, or several of these, got {type(texts).__name__}")
    if isinstance(given, Sequence) and all(isinstance(one, Path) for one in given):
        total = sum(count_pieces(one) for one in given)
        for _ in watch(_steps(tally, given), "counting", total):
            pass
        return
    for one in watch(given, "counting", len(given)) if isinstance(given, Sequence) else given:
        if not isinstance(one, (str, Path)):
            raise TypeError(f"texts must hold texts or pathlib.Paths, got {type(one).__name__}")
        for _ in _steps(tally, [one]):
            pass


def _steps(tally: Tally, texts: Iterable[str | Path]) -> Iterator[None]:
    """One step for each piece of a file, or for each text."""
    for one in texts:
        if isinstance(one, str) and _is_file(one):
            raise ValueError(f"texts: {one} is a file; give pathlib.Path({one!r})")
        for piece in text_pieces(one) if isinstance(one, Path) else (one,):
            tally.add(piece)
            yield
        tally.end()


def _is_file(text: str) -> bool:
    """Whether what is given as a text is rather the name of a file."""
    return len(text) < 256 and "\0" not in text and Path(text).is_file()
