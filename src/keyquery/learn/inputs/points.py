"""Tables and sequences to points: one per row, or one per time step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Shaped

from keyquery.learn.data.series import Series
from keyquery.learn.inputs import sequences, tables

BOOLEANS = {"False": 0.0, "True": 1.0, None: np.nan}  # as `tables.columns_of` names them


class Points(NamedTuple):
    """Time steps of all samples, concatenated, and the sample of each."""

    values: Float64[np.ndarray, "points features"]
    owner: Int[np.ndarray, " points"]
    names: list[str] | None  # of the features, if X has names

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.owner[-1]) + 1

    def of(self, samples: Int[np.ndarray, " some"]) -> Bool[np.ndarray, " points"]:
        """Which points belong to these samples."""
        return np.isin(self.owner, samples)

    def chosen(self, kept: Bool[np.ndarray, " samples"]) -> Points:
        """The points of the samples that are kept, numbered anew."""
        here = kept[self.owner]
        return Points(self.values[here], np.cumsum(kept)[self.owner[here]] - 1, self.names)


def points_of(X: Any) -> Points:
    """Points of a table (n, features), of sequences (n, T, features), or of a list of them, (T, features) each.

    A table may be a data frame, a `kq.data.Table`, an array or a list of rows; sequences may be a `kq.data.Series`.
    All must be finite numbers.
    """
    if isinstance(X, Series):
        X = list(X.values)
    if sequences.axes_of(X) == 3:
        names, series = sequences.columns_of(X), sequences.series_of(X)
        values, owner = np.concatenate(series), np.repeat(np.arange(len(series)), [len(steps) for steps in series])
    else:
        columns = tables.columns_of(X)
        names, values = columns.names, np.stack(list(map(_numbers, columns.called, columns.values)), 1)
        owner = np.arange(len(values))
    if not np.isfinite(values).all():
        bad = ~np.isfinite(values).all(1)
        first = owner[bad.argmax()]
        raise ValueError(f"X must be finite; {bad.sum()} of {len(bad)} points hold NaN, the first in sample {first}")
    return Points(values, owner, names)


def _numbers(name: str, column: Shaped[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """A column as numbers; booleans are 0 and 1."""
    if column.dtype != object:
        return column
    if not BOOLEANS.keys() >= set(column):
        raise ValueError(f"X must be numeric, but column {name!r} holds categories: encode them as numbers")
    return np.array([BOOLEANS[value] for value in column])
