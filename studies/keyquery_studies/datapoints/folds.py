"""Which rows of a table are learned from, chosen by and tested on: the published folds, without scikit-learn.

They are those of scikit-learn's KFold or, of classes, StratifiedKFold, shuffled by 42, and of its train_test_split by
the same seed for what chooses the model. numpy's old generator is what those draw from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from keyquery.support.checks import check_count

SEED = 42


class Fold(NamedTuple):
    """Places of rows, each part in ascending order."""

    learned: Int[np.ndarray, " learned"]
    held: Int[np.ndarray, " held"]  # what chooses among models, or among steps of one
    test: Int[np.ndarray, " test"]


def fold_of(
    number: int, count: int, test: float, held: float, classes: Int[np.ndarray, " n"] | None = None, seed: int = SEED
) -> Fold:
    """Fold `number` of int(1/test), of `count` rows; `held` is a share of all rows, too.

    With `classes`, every part has each class in its share.

    >>> fold = fold_of(0, 10, test=0.1, held=0.2)
    >>> [part.tolist() for part in fold]
    [[0, 2, 3, 4, 5, 6, 9], [1, 7], [8]]
    """
    splits = int(1 / test)
    check_count("fold", number, least=0, most=splits - 1)
    of = _blocks(count, splits, seed) if classes is None else _class_blocks(classes, splits, seed)
    rest, tested = np.flatnonzero(of != number), np.flatnonzero(of == number)
    share = held / (1 - test)
    chosen = _some(len(rest), share, seed) if classes is None else _some_of_each(classes[rest], share, seed)
    return Fold(np.setdiff1d(rest, rest[chosen]), np.sort(rest[chosen]), tested)


def _blocks(count: int, splits: int, seed: int) -> Int[np.ndarray, " n"]:
    """Which fold tests each row: shuffled rows in blocks, the first of them one longer until all are given out."""
    order = np.arange(count)
    np.random.RandomState(seed).shuffle(order)
    sizes = np.full(splits, count // splits)
    sizes[: count % splits] += 1
    fold_of = np.empty(count, dtype=np.int64)
    fold_of[order] = np.repeat(np.arange(splits), sizes)
    return fold_of


def _class_blocks(classes: Int[np.ndarray, " n"], splits: int, seed: int) -> Int[np.ndarray, " n"]:
    """The same class by class, in the order in which classes first appear; counts by dealing sorted rows in turn."""
    _, first, codes = np.unique(classes, return_index=True, return_inverse=True)
    codes = np.argsort(np.argsort(first))[codes]
    dealt = np.sort(codes)
    rng, fold_of = np.random.RandomState(seed), np.empty(len(classes), dtype=np.int64)
    for code in range(len(first)):
        sizes = [int((dealt[start::splits] == code).sum()) for start in range(splits)]
        places = np.repeat(np.arange(splits), sizes)
        rng.shuffle(places)
        fold_of[codes == code] = places
    return fold_of


def _some(count: int, share: float, seed: int) -> Int[np.ndarray, " some"]:
    return np.random.RandomState(seed).permutation(count)[: math.ceil(share * count)]


def _some_of_each(classes: Shaped[np.ndarray, " n"], share: float, seed: int) -> Int[np.ndarray, " some"]:
    """A share of all, each class in proportion, by the draws that scikit-learn makes."""
    rng = np.random.RandomState(seed)
    held = math.ceil(share * len(classes))
    _, codes, counts = np.unique(classes, return_inverse=True, return_counts=True)
    learned = _dealt(counts, len(classes) - held, rng)
    apart = _dealt(counts - learned, held, rng)
    picked = []
    for code, (before, taken) in enumerate(zip(learned, apart, strict=True)):
        mixed = np.flatnonzero(codes == code)[rng.permutation(counts[code])]
        picked.append(mixed[before : before + taken])
    return np.concatenate(picked)


def _dealt(counts: Int[np.ndarray, " k"], total: int, rng: np.random.RandomState) -> Int[np.ndarray, " k"]:
    """`total` in proportion to counts, rounded: the rest goes to the largest remainders, ties at random."""
    exact = counts / counts.sum() * total
    whole = np.floor(exact)
    rest, left = exact - whole, int(total - whole.sum())
    for value in np.unique(rest)[::-1]:
        if left <= 0:
            break
        alike = np.flatnonzero(rest == value)
        lucky = rng.choice(alike, size=min(len(alike), left), replace=False)
        whole[lucky] += 1
        left -= len(lucky)
    return whole.astype(np.int64)
