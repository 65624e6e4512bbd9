"""Tables with numeric, categorical and missing values to tensors; tables and sequences to points."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor

from keyquery.learn.data.series import Series
from keyquery.learn.data.tables import Table
from keyquery.learn.inputs import sequences
from keyquery.learn.inputs.targets import dense, is_missing

SHOWN = 5  # names that an error lists
BOOLEANS = {"False": 0.0, "True": 1.0, None: np.nan}  # as `columns_of` names them


class Rows(NamedTuple):
    """Entries of a table: a standardised number or a category code; `hidden` if missing or masked."""

    values: Float[Tensor, "*batch d"]
    codes: Int[Tensor, "*batch d"]
    hidden: Bool[Tensor, "*batch d"]

    def take(self, index: Any) -> Rows:
        """A subset of the rows."""
        chosen = torch.as_tensor(index, device=self.hidden.device)
        return Rows(*(part[chosen] for part in self))

    def to(self, device: Any) -> Rows:
        """The same on another device."""
        return Rows(*(part.to(device) for part in self))

    def within(self) -> Rows:
        """With a batch dimension of 1."""
        return Rows(*(part.unsqueeze(0) for part in self))


@dataclass(frozen=True)
class Field:
    """A column of the training data: mean and standard deviation, or categories."""

    name: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        """Number of categories; 0 for a numeric column."""
        return len(self.categories or ())


class Columns(NamedTuple):
    """Columns of equal length: float64 with NaN for numbers, arrays of str and None for categories."""

    names: list[str] | None  # if the table has names
    values: list[Shaped[np.ndarray, " n"]]

    def take(self, rows: Any) -> Columns:
        """Some of the rows."""
        return Columns(self.names, [column[rows] for column in self.values])

    @property
    def called(self) -> list[str]:
        """The names of the columns; their numbers if they have none."""
        return self.names or [str(number) for number in range(len(self.values))]


def columns_of(X: Any) -> Columns:
    """Columns of a data frame (pandas, polars), a `kq.data.Table` (without its target), an array or a list of rows."""
    X = dense(X)
    if isinstance(X, Table):
        kept = [number for number in range(len(X.columns)) if number != X.target]
        columns = Columns([X.columns[number] for number in kept], [_of_column(X, number) for number in kept])
    elif hasattr(X, "columns") and hasattr(X, "dtypes"):
        columns = _of_frame(X)
    else:
        array = _array(X)
        columns = Columns(None, [_column(str(number), array[:, number]) for number in range(array.shape[1])])
    shape = (len(columns.values[0] if columns.values else X), len(columns.values))
    if 0 in shape:  # in the words of scikit-learn
        what = "columns: 0 feature(s)" if shape[0] else "rows: 0 sample(s)"
        raise ValueError(f"X has no {what} (shape={shape}) while a minimum of 1 is required.")
    return columns


def _array(X: Any) -> Shaped[np.ndarray, "rows columns"]:
    if isinstance(X, (list, tuple)):
        if len({len(row) if hasattr(row, "__len__") and not isinstance(row, str) else None for row in X}) > 1:
            raise ValueError("X must be a table (rows, columns), but its rows differ in length")
        X = np.array(X, dtype=object)
    array = np.asarray(X)
    if array.ndim != 2:
        hint = f"shape {array.shape}. Reshape your data: pass a single row as X[None]"
        raise ValueError(f"X must be a table (rows, columns), got {hint if array.ndim else type(X).__name__}")
    return array


def _of_column(table: Table, number: int) -> Shaped[np.ndarray, " n"]:
    """Numbers, or the names of categories."""
    values, categories = table.values[number], table.categories[number]
    return values if table.kinds[number] == "numeric" else np.array([*categories, None], dtype=object)[values]


def target_of(X: Any, y: Any) -> Any:
    """y, or if it is None, the labels of a `kq.data.Series` or the target column of a `kq.data.Table`."""
    if y is None and isinstance(X, Series):
        return X.labels
    return _of_column(X, X.target) if y is None and isinstance(X, Table) and X.target is not None else y


def _of_frame(frame: Any) -> Columns:
    labels = list(frame.columns)
    texts = [isinstance(name, str) for name in labels]
    if any(texts) and not all(texts):
        raise TypeError("column names of X must be all strings, or none of them, got both")
    twice = sorted({str(name) for name in labels if labels.count(name) > 1})
    if twice:
        raise ValueError(f"column names of X must be unique, got more than once: {', '.join(twice)}")
    names, values = list(map(str, labels)), []
    for number, name in enumerate(names):
        column = frame.iloc[:, number] if hasattr(frame, "iloc") else frame[name]
        if str(column.dtype) == "category":
            values.append(_texts(column.astype(object).to_numpy()))
            continue
        # A column of pandas' own dtypes, such as Int64 or string, keeps its missing values as objects.
        boxed = {"dtype": object} if hasattr(column, "iloc") and not isinstance(column.dtype, np.dtype) else {}
        values.append(_column(name, column.to_numpy(**boxed)))
    return Columns(names if all(texts) else None, values)


def _column(name: str, values: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
    kind = values.dtype.kind
    if kind == "c":
        raise ValueError(f"Complex data not supported: column {name!r} of X")
    if kind in "iuf":
        return _finite(name, values.astype(np.float64))
    if kind in "bUS":
        return _texts(values.astype(object))
    if kind == "O":
        present = [value for value in values if not is_missing(value)]
        logical = [isinstance(value, (bool, np.bool_)) for value in present]
        if not any(logical) and all(isinstance(value, (Real, Decimal)) for value in present):
            return _finite(name, np.array([np.nan if is_missing(value) else float(value) for value in values]))
        if all(logical) or all(isinstance(value, (str, bytes)) for value in present):
            return _texts(values)
        kinds = sorted({type(value).__name__ for value in present})
        raise TypeError(
            f"column {name!r} of X holds {' and '.join(kinds[:SHOWN])}: the argument must be a table whose columns are "
            "strings or categories, or numbers, each of one kind"
        )
    raise TypeError(
        f"column {name!r} of X is of dtype {values.dtype}, which is neither numbers nor categories: convert "
        "dates to numbers, such as days since a reference date"
    )


def _texts(values: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
    return np.array([None if is_missing(value) else _text(value) for value in values], dtype=object)


def _text(value: Any) -> str:
    """The name of a category; 1.0 becomes "1", since pandas stores integers with missing values as floats."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(int(value)) if isinstance(value, (float, np.floating)) and value.is_integer() else str(value)


def _finite(name: str, values: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
    if np.isinf(values).any():
        raise ValueError(f"column {name!r} of X holds infinity: values must be finite, or NaN where they are missing")
    return values


def check_features(name: str, known: tuple[Any, int], received: tuple[list[str] | None, int]) -> None:
    """Require the features seen in fit, each as names (or None) and their number.

    Errors and warnings have the wording of scikit-learn.
    """
    (old, count), (new, received_count) = known, received
    if old is not None and new is not None and list(old) != new:
        message = _listed("Feature names unseen at fit time", {*new} - {*old})
        message += _listed("Feature names seen at fit time, yet now missing", {*old} - {*new})
        message = message or "Feature names must be in the same order as they were in fit.\n"
        raise ValueError(f"The feature names should match those that were passed during fit.\n{message}")
    if received_count != count:
        raise ValueError(f"X has {received_count} features, but {name} is expecting {count} features as input")
    if (old is None) != (new is None):
        unnamed = "X does not have valid feature names, but {} was fitted with feature names"
        named = "X has feature names, but {} was fitted without feature names"
        warnings.warn((unnamed if new is None else named).format(name), UserWarning, stacklevel=5)


def _listed(heading: str, names: set[str]) -> str:
    return f"{heading}:\n" + "".join(f"- {name}\n" for name in sorted(names)[:SHOWN]) if names else ""


def fields_of(columns: Columns) -> list[Field]:
    """Statistics or categories of each column, from its non-missing values."""
    fields = []
    for name, values in zip(columns.called, columns.values, strict=True):
        if values.dtype == object:
            fields.append(Field(name, categories=tuple(sorted({value for value in values if value is not None}))))
        else:
            mean, scale = sequences.statistics([values[:, None]])
            fields.append(Field(name, float(mean[0]), float(scale[0])))
    return fields


def encode(columns: Columns, fields: Sequence[Field]) -> Rows:
    """Columns as tensors (n, d). A category unseen in training is treated as missing, with a warning."""
    n, d = len(columns.values[0]), len(fields)
    values, codes = np.zeros((n, d), dtype=np.float32), np.zeros((n, d), dtype=np.int64)
    hidden = np.zeros((n, d), dtype=bool)
    for index, (field, column) in enumerate(zip(fields, columns.values, strict=True)):
        if field.categories is None:
            if column.dtype == object and any(value is not None for value in column):
                raise ValueError(f"column {field.name!r} of X was numeric in training, but now holds categories")
            numbers = column.astype(np.float64)
            hidden[:, index] = np.isnan(numbers)
            with np.errstate(over="ignore"):
                values[:, index] = np.nan_to_num((numbers - field.mean) / field.scale, nan=0.0, posinf=np.inf)
        else:
            known = {name: code for code, name in enumerate(field.categories)}
            texts = column if column.dtype == object else _texts(column.astype(object))
            codes[:, index] = [known.get(text, -1) for text in texts]
            hidden[:, index] = codes[:, index] < 0
            _warn_of_unseen(field, {text for text in texts if text is not None and text not in known})
    return Rows(torch.from_numpy(values), torch.from_numpy(codes.clip(min=0)), torch.from_numpy(hidden))


def _warn_of_unseen(field: Field, unseen: set[str]) -> None:
    if unseen:
        listed = ", ".join(map(repr, sorted(unseen)[:SHOWN])) + (", …" if len(unseen) > SHOWN else "")
        warnings.warn(
            f"column {field.name!r} of X holds categories not seen in training: {listed}; they are treated as missing",
            UserWarning,
            stacklevel=6,
        )


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
        columns = columns_of(X)
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
