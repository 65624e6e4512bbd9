"""The columns of a table as variables: numbers, or codes of categories."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from keyquery.learn.data.tables import Table
from keyquery.learn.inputs.tables import columns_of
from keyquery.support.checks import check_choice, check_count

MIN_ROWS = 5


@dataclass(frozen=True)
class Variables:
    """Columns without missing values; `sizes` is the number of categories of each, 0 for numbers."""

    names: list[str]
    values: Float[ndarray, "n d"]
    sizes: list[int]
    dropped: int = 0  # rows with a missing value

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: Int[ndarray, " m"]) -> Variables:
        """Some of the rows."""
        return replace(self, values=self.values[rows])

    def codes(self, column: int) -> Int[ndarray, " n"]:
        """The codes of a categorical column."""
        return self.values[:, column].astype(np.int64)

    def lagged(self, lags: int) -> tuple[Variables, list[int]]:
        """Rows in order of time: each column at its row and at the `lags` rows before, and tiers, oldest first."""
        most = len(self) - MIN_ROWS
        if lags > most:
            rows = f"at most {max(most, 0)} for {len(self)}"
            raise ValueError(f"lags must leave at least {MIN_ROWS} rows: {rows}, got {lags}")
        names = [f"{name}[t{-lag if lag else ''}]" for lag in range(lags, -1, -1) for name in self.names]
        blocks = [self.values[lags - lag : len(self) - lag] for lag in range(lags, -1, -1)]
        tiers = [step for step in range(lags + 1) for _ in self.names]
        return Variables(names, np.concatenate(blocks, 1), self.sizes * (lags + 1), self.dropped), tiers


def variables_of(X: Any, names: Sequence[str] | None = None, discrete: bool | Collection[str] = False) -> Variables:
    """Read a `kq.data.Table`, a data frame or an array; rows with a missing value are dropped, with a warning."""
    columns = columns_of(replace(X, target=None) if isinstance(X, Table) else X)
    labels, count = columns.called if names is None else list(names), len(columns.values)
    if count < 2:
        raise ValueError(f"X must have at least 2 columns, got {count}")
    if len(labels) != count or len(set(labels)) < count or not all(isinstance(name, str) for name in labels):
        raise ValueError(f"names must be {count} different strings, one per column, got {len(labels)}: {labels!r:.80}")
    categorical = labels if discrete is True else discrete or ()
    if isinstance(categorical, str) or not isinstance(categorical, Collection):
        raise TypeError(f"discrete must be True, False or a list of columns, got {discrete!r:.60}")
    for name in categorical:
        check_choice("a column of discrete", name, labels)
    read = [_coded(*column, column[0] in categorical) for column in zip(labels, columns.values, strict=True)]
    whole = ~np.any([np.isnan(values) for values, _ in read], axis=0)
    if whole.sum() < MIN_ROWS:
        raise ValueError(f"X must have at least {MIN_ROWS} rows without a missing value, got {int(whole.sum())}")
    if dropped := int((~whole).sum()):
        warnings.warn(f"{dropped} of {len(whole)} rows have a missing value and are not used", stacklevel=4)
    values = np.stack([column[whole] for column, _ in read], 1)
    if constant := [name for name, column in zip(labels, values.T, strict=True) if np.ptp(column) == 0]:
        listed = ", ".join(map(repr, constant))
        raise ValueError(f"columns of X must vary, but these are constant: {listed:.200}; leave them out")
    return Variables(labels, values, [size for _, size in read], dropped)


def _coded(name: str, column: Shaped[ndarray, " n"], discrete: bool) -> tuple[Float[ndarray, " n"], int]:
    """Values or codes, with NaN where missing, and the number of categories: 0 for numbers, else at least 1."""
    categorical = column.dtype == object
    if not categorical and not discrete:
        return column, 0
    missing = np.array([value is None for value in column]) if categorical else np.isnan(column)
    different, codes = np.unique(column[~missing], return_inverse=True)
    # A column that is different in most rows says nothing of any other.
    most = max(2, len(column) // 2)
    check_count(f"the number of categories of column {name!r}", len(different), least=0, most=most)
    values = np.full(len(column), np.nan)
    values[~missing] = codes
    return values, max(len(different), 1)
