"""The columns of a table as variables: numbers, or codes of categories."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from keyquery.learn.data.tables import Table
from keyquery.support.checks import check_choice, check_count

LEAST = 5  # rows
SHOWN = 5  # names that an error lists


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
        most = len(self) - LEAST
        if lags and lags > most:
            raise ValueError(
                f"lags must leave at least {LEAST} rows: at most {max(most, 0)} for {len(self)}, got {lags}"
            )
        names = [f"{name}[t{-lag if lag else ''}]" for lag in range(lags, -1, -1) for name in self.names]
        blocks = [self.values[lags - lag : len(self) - lag] for lag in range(lags, -1, -1)]
        tiers = [step for step in range(lags + 1) for _ in self.names]
        return Variables(names, np.concatenate(blocks, 1), self.sizes * (lags + 1), self.dropped), tiers


def variables_of(X: Any, names: Sequence[str] | None = None, discrete: bool | Collection[str] = False) -> Variables:
    """Read a `kq.data.Table`, a data frame or an array; texts, booleans and categories are categorical.

    `discrete` names further columns that are categorical, or True for all. Rows with a missing value are dropped, with
    a warning.
    """
    labels, columns = _columns(X)
    if names is not None:
        labels = _renamed(list(names), len(columns))
    chosen = set(labels) if discrete is True else set() if discrete is False else _chosen(discrete, labels)
    read = [_column(name, column, name in chosen) for name, column in zip(labels, columns, strict=True)]
    whole = ~np.any([np.isnan(values) for values, _ in read], axis=0)
    if (dropped := int((~whole).sum())) and whole.sum() >= LEAST:
        warnings.warn(f"{dropped} of {len(whole)} rows have a missing value and are not used", stacklevel=4)
    if whole.sum() < LEAST:
        raise ValueError(f"X must have at least {LEAST} rows without a missing value, got {int(whole.sum())}")
    values = np.stack([column[whole] for column, _ in read], 1)
    if constant := [name for name, column in zip(labels, values.T, strict=True) if np.ptp(column) == 0]:
        listed = ", ".join(map(repr, constant[:SHOWN])) + (", …" if len(constant) > SHOWN else "")
        raise ValueError(f"columns of X must vary, but these are constant: {listed}; leave them out")
    return Variables(labels, values, [size for _, size in read], dropped)


def _columns(X: Any) -> tuple[list[str], list[Shaped[ndarray, " n"]]]:
    """Names and arrays of the columns."""
    if isinstance(X, Table):
        categories = zip(X.values, X.kinds, X.categories, strict=True)
        return list(X.columns), [
            np.array([*names, None], dtype=object)[values] if kind == "categorical" else values
            for values, kind, names in categories
        ]
    if hasattr(X, "columns") and hasattr(X, "dtypes"):
        labels = [str(label) for label in X.columns]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"column names of X must be unique, got more than once: {', '.join(twice[:SHOWN])}")
        return _some(labels, [np.asarray(X[label]) for label in X.columns], X.shape)
    array = np.asarray(X.detach().cpu() if hasattr(X, "detach") else X)
    if array.ndim != 2:
        raise ValueError(f"X must be a table (rows, columns), got shape {array.shape}")
    return _some([str(number) for number in range(array.shape[1])], list(array.T), array.shape)


def _some(
    labels: list[str], columns: list[Shaped[ndarray, " n"]], shape: tuple[int, ...]
) -> tuple[list[str], list[Shaped[ndarray, " n"]]]:
    if shape[1] < 2:
        raise ValueError(f"X must have at least 2 columns, got {shape[1]}")
    return labels, columns


def _renamed(names: list[str], count: int) -> list[str]:
    if len(names) != count or len(set(names)) < count or not all(isinstance(name, str) for name in names):
        raise ValueError(f"names must be {count} different strings, one per column, got {len(names)}: {names!r:.80}")
    return names


def _chosen(discrete: Collection[str], labels: list[str]) -> set[str]:
    if isinstance(discrete, str) or not hasattr(discrete, "__iter__"):
        raise TypeError(f"discrete must be True, False or a list of columns, got {discrete!r:.60}")
    for name in discrete:
        check_choice("a column of discrete", name, labels)
    return set(discrete)


def _column(name: str, column: Shaped[ndarray, " n"], discrete: bool) -> tuple[Float[ndarray, " n"], int]:
    """Values, with NaN where missing, and the number of categories."""
    if column.dtype.kind in "mMc":
        raise TypeError(f"column {name!r} of X is of dtype {column.dtype}: convert it to numbers or categories")
    if column.dtype.kind in "biuf" and not (column.dtype.kind == "f" and np.isnan(column).any()):  # the usual case
        if column.dtype.kind != "b" and not discrete:
            return _finite(name, column.astype(np.float64)), 0
        ranks, count = _codes(column)
        return ranks.astype(np.float64), _categories(name, count, len(column))
    missing = np.array([value is None or value != value or str(value) in ("<NA>", "NaT") for value in column.tolist()])
    present = column[~missing].tolist()
    numeric = all(isinstance(value, Real) and not isinstance(value, bool) for value in present)
    if numeric and not discrete:
        values = np.full(len(column), np.nan)
        values[~missing] = np.array(present, dtype=np.float64)
        return _finite(name, values), 0
    if not numeric and not all(isinstance(value, (str, bytes, bool)) for value in present):
        kinds = sorted({type(value).__name__ for value in present})
        raise TypeError(f"column {name!r} of X holds {' and '.join(kinds[:SHOWN])}: numbers or texts are required")
    code_of = {value: float(code) for code, value in enumerate(sorted(set(present)))}
    codes = [np.nan if gone else code_of[value] for value, gone in zip(column.tolist(), missing, strict=True)]
    return np.array(codes, dtype=np.float64), _categories(name, len(code_of), len(column))


def _codes(column: Shaped[ndarray, " n"]) -> tuple[Int[ndarray, " n"], int]:
    """Ranks of values among those that occur, and their number; small whole numbers need no sorting."""
    with np.errstate(invalid="ignore"):
        whole = column.astype(np.int64)
    low, high = (int(end) for end in (whole.min(), whole.max())) if len(whole) else (0, 0)
    if high - low > len(whole) or not np.array_equal(whole, column):
        different, inverse = np.unique(column, return_inverse=True)
        return inverse, len(different)
    occurs = np.bincount(whole - low) > 0
    return (occurs.cumsum() - 1)[whole - low], int(occurs.sum())


def _categories(name: str, count: int, rows: int) -> int:
    """The number of categories, at least 1; refuses a column that is different in most rows."""
    check_count(f"the number of categories of column {name!r}", count, least=0, most=max(2, rows // 2))
    return max(count, 1)


def _finite(name: str, values: Float[ndarray, " n"]) -> Float[ndarray, " n"]:
    if np.isinf(values).any():
        raise ValueError(f"column {name!r} of X holds infinity: values must be finite, or NaN where they are missing")
    return values
