"""The published folds: which rows of a table are trained on, validated on and tested on.

They are those of scikit-learn's KFold or, for classes, StratifiedKFold, shuffled with seed 42, and of its
train_test_split with the same seed for the validation split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from keyquery.support.checks import check_count
from keyquery.support.extras import optional

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
    """
    splits = int(1 / test)
    check_count("fold", number, least=0, most=splits - 1)
    selection = optional("sklearn.model_selection", "a fold")
    kind = selection.KFold if classes is None else selection.StratifiedKFold
    options: dict[str, Any] = {"random_state": seed}
    rest, tested = list(kind(splits, shuffle=True, **options).split(np.zeros(count), classes))[number]
    options |= {"test_size": held / (1 - test), "stratify": None if classes is None else classes[rest]}
    learned, validation = selection.train_test_split(rest, **options)
    return Fold(np.sort(learned), np.sort(validation), tested)
