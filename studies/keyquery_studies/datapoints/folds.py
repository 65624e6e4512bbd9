"""Training, validation and test rows of a table: the published folds, without scikit-learn.

They equal scikit-learn's KFold (StratifiedKFold for classes), shuffled with seed 42, with the validation split of its
train_test_split at the same seed. Both draw from numpy's legacy generator.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from keyquery.support.checks import check_count

SEED = 42


class Fold(NamedTuple):
    """Row indices, each part in ascending order."""

    learned: Int[np.ndarray, " learned"]
    held: Int[np.ndarray, " held"]  # validation split
    test: Int[np.ndarray, " test"]


def fold_of(
    number: int, count: int, test: float, held: float, classes: Int[np.ndarray, " n"] | None = None, seed: int = SEED
) -> Fold:
    """Fold `number` of int(1/test) of `count` rows; `held`, like `test`, is a share of all rows.

    With `classes`, the split is stratified.

    >>> fold = fold_of(0, 10, test=0.1, held=0.2)
    >>> [part.tolist() for part in fold]
    [[0, 2, 3, 4, 5, 6, 9], [1, 7], [8]]
    """
    splits = int(1 / test)
    check_count("fold", number, least=0, most=splits - 1)
    test_fold = _blocks(count, splits, seed) if classes is None else _class_blocks(classes, splits, seed)
    rest, tested = np.flatnonzero(test_fold != number), np.flatnonzero(test_fold == number)
    share = held / (1 - test)
    chosen = _subset(len(rest), share, seed) if classes is None else _stratified_subset(classes[rest], share, seed)
    return Fold(np.setdiff1d(rest, rest[chosen]), np.sort(rest[chosen]), tested)


def _blocks(count: int, splits: int, seed: int) -> Int[np.ndarray, " n"]:
    """The fold that tests each row: shuffled rows in blocks, the first ones longer by one if there is a remainder."""
    order = np.arange(count)
    np.random.RandomState(seed).shuffle(order)
    sizes = np.full(splits, count // splits)
    sizes[: count % splits] += 1
    test_fold = np.empty(count, dtype=np.int64)
    test_fold[order] = np.repeat(np.arange(splits), sizes)
    return test_fold


def _class_blocks(classes: Int[np.ndarray, " n"], splits: int, seed: int) -> Int[np.ndarray, " n"]:
    """The same per class, in order of first appearance; sorted rows are allocated to folds in turn."""
    _, first, codes = np.unique(classes, return_index=True, return_inverse=True)
    codes = np.argsort(np.argsort(first))[codes]
    ordered = np.sort(codes)
    rng, test_fold = np.random.RandomState(seed), np.empty(len(classes), dtype=np.int64)
    for code in range(len(first)):
        sizes = [int((ordered[start::splits] == code).sum()) for start in range(splits)]
        folds = np.repeat(np.arange(splits), sizes)
        rng.shuffle(folds)
        test_fold[codes == code] = folds
    return test_fold


def _subset(count: int, share: float, seed: int) -> Int[np.ndarray, " some"]:
    return np.random.RandomState(seed).permutation(count)[: math.ceil(share * count)]


def _stratified_subset(classes: Shaped[np.ndarray, " n"], share: float, seed: int) -> Int[np.ndarray, " some"]:
    """A stratified share of all rows, drawn as scikit-learn does."""
    rng = np.random.RandomState(seed)
    held = math.ceil(share * len(classes))
    _, codes, counts = np.unique(classes, return_inverse=True, return_counts=True)
    learned = _allocated(counts, len(classes) - held, rng)
    validation = _allocated(counts - learned, held, rng)
    picked = []
    for code, (before, taken) in enumerate(zip(learned, validation, strict=True)):
        shuffled = np.flatnonzero(codes == code)[rng.permutation(counts[code])]
        picked.append(shuffled[before : before + taken])
    return np.concatenate(picked)


def _allocated(counts: Int[np.ndarray, " k"], total: int, rng: np.random.RandomState) -> Int[np.ndarray, " k"]:
    """`total` in proportion to counts, by the largest-remainder method, with ties broken at random."""
    exact = counts / counts.sum() * total
    whole = np.floor(exact)
    rest, left = exact - whole, int(total - whole.sum())
    for value in np.unique(rest)[::-1]:
        if left <= 0:
            break
        tied = np.flatnonzero(rest == value)
        chosen = rng.choice(tied, size=min(len(tied), left), replace=False)
        whole[chosen] += 1
        left -= len(chosen)
    return whole.astype(np.int64)
