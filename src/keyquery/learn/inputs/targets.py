"""Columns of labels and numbers, one value per row, and weights, validated; labels to JSON and back."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from keyquery.support.extras import optional

LABELS = {"i": "number", "u": "number", "f": "number", "b": "bool", "U": "text", "S": "bytes", "M": "date"}
LETTERS = 1024  # a saved label's dtype may be this wide even if every label is shorter


def labels_of(name: str, y: Any, count: int, what: str = "y") -> Shaped[np.ndarray, " n"]:
    """Validated class labels (n,) of an estimator: one per sample, none missing; `what` names them in errors."""
    return labels_of_column(what, _target(name, y, count, what))


def numbers_of(name: str, y: Any, count: int) -> Float64[np.ndarray, " n"]:
    """Validated regression targets (n,) of an estimator: one finite number per sample."""
    check_array = optional("sklearn.utils.validation", name).check_array
    return check_array(_target(name, y, count, "y"), dtype=np.float64, ensure_2d=False, input_name="y")


def labels_of_column(name: str, values: Any) -> Shaped[np.ndarray, " n"]:
    """A column of labels of one type, none of them missing."""
    labels = column_of(name, values)
    if labels.dtype == object:
        if len({LABELS.get(np.asarray(label).dtype.kind) for label in labels}) > 1:
            names = sorted({type(label).__name__ for label in labels})
            raise ValueError(f"{name} must hold labels of one type, got {', '.join(names)}")
        labels = np.array(labels.tolist())
    fractions = labels.dtype.kind == "f" and np.any(labels != np.round(labels))
    if labels.ndim != 1 or labels.dtype.kind not in LABELS or fractions:
        received = f"{labels.dtype} such as {labels.tolist()[0]!r}"
        raise ValueError(f"Unknown label type: {name} must hold strings, integers or dates, got {received}")
    return labels


def column_of(name: str, values: Any) -> Shaped[np.ndarray, " n"]:
    """One value per row, none of them missing, of a list, an array, a tensor, or a column of pandas or pyarrow."""
    values = dense(values)
    if getattr(getattr(values, "dtype", None), "tz", None) is not None:  # a column of pandas with a time zone
        values = getattr(values, "dt", values).tz_convert("UTC")
        values = getattr(values, "dt", values).tz_localize(None)
    column = _from_list(values) if isinstance(values, (list, tuple)) else np.asarray(values)
    if column.ndim != 1:
        received = f"shape {column.shape}" if column.ndim else type(values).__name__
        raise ValueError(f"{name} must be a column with one value per row, got {received}")
    if column.dtype.kind in "OT":
        column = column.astype(object)
        missing = np.flatnonzero([is_missing(value) for value in column])
    else:
        missing = np.flatnonzero(~np.isfinite(column)) if column.dtype.kind in "fmM" else np.zeros(0, dtype=np.int64)
    if len(missing):
        rows = f"{len(missing)} of {len(column)} rows, the first of them row {missing[0]}"
        raise ValueError(f"{name} must have a value in every row, got None, NaN or infinity in {rows}")
    return column


def _from_list(values: list[Any] | tuple[Any, ...]) -> np.ndarray:
    """A list as an object array; numpy would convert mixed numbers and strings, and None, to strings."""
    if len(kinds := {type(value) for value in values}) == 1 and kinds <= {int, float, str, bool, bytes}:
        return np.array(values)
    objects = np.empty(len(values), dtype=object)
    objects[:] = values
    return objects


def weights_of(
    name: str, labels: Shaped[np.ndarray, " n"], sample_weight: Any = None, class_weight: Any = None
) -> Float64[np.ndarray, " n"]:
    """Weights of samples times those of their classes, scaled to mean 1.

    `class_weight` is None, "balanced" or {label: weight}, as in scikit-learn.
    """
    validation, by_class = optional("sklearn.utils.validation", name), optional("sklearn.utils.class_weight", name)
    given = sample_weight.detach().cpu().numpy() if isinstance(sample_weight, Tensor) else sample_weight
    weights = validation._check_sample_weight(
        given, np.empty((len(labels), 1)), dtype=np.float64, ensure_non_negative=True
    )
    if class_weight is not None:
        weights = weights * by_class.compute_sample_weight(class_weight, labels)
    if not (np.isfinite(weights).all() and weights.sum() > 0):
        raise ValueError("sample_weight must be finite, and not 0 for all samples")
    return weights / weights[weights > 0].mean()


def kept_of(y: Any, kept: Shaped[np.ndarray, " some"], count: int) -> Any:
    """Some of the targets, by index or by mask; y itself if it is not one value per row, which is refused later."""
    rows = np.arange(count)[kept]
    if y is None or np.ndim(y) != 1 or len(y) != count or len(rows) == count:
        return y
    if isinstance(y, (list, tuple)):
        return [y[row] for row in rows]
    return y.iloc[rows] if hasattr(y, "iloc") else y[rows]


def _target(name: str, y: Any, count: int, what: str) -> Shaped[np.ndarray, " n"]:
    """One value per sample, of any dtype, with the errors and the warning of scikit-learn."""
    if y is None:
        raise ValueError(f"{name} requires {what} to be passed, but the target {what} is None")
    validation = optional("sklearn.utils.validation", name)
    if not isinstance(y, (list, tuple)) and np.asarray(y).ndim > 1:
        y = validation.column_or_1d(y, warn=True)
    column = column_of(what, y)
    validation.check_consistent_length(range(count), column)
    return column


def dense(X: Any) -> Any:
    """X, a tensor as an array, masked entries as None; sparse matrices and lazy frames are refused."""
    if hasattr(X, "toarray") or (isinstance(X, Tensor) and X.layout != torch.strided):
        remedy = "X.to_dense()" if isinstance(X, Tensor) else "X.toarray()"
        raise TypeError(f"X is a sparse matrix; dense data is required: use {remedy}")
    if type(X).__name__ == "LazyFrame":
        raise TypeError("X is a lazy frame, whose rows are not known yet: pass X.collect()")
    if np.ma.is_masked(X):
        values = X.data.astype(object)
        values[X.mask] = None
        return values
    if not isinstance(X, Tensor):
        return X
    return (X.double() if X.is_floating_point() else X).detach().cpu().numpy()  # numpy has no bfloat16


def is_missing(value: Any) -> bool:
    """Whether a value is missing: None, NaN, or pandas' NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, (Real, Decimal, np.generic)) and bool(value != value)


def label_facts(classes: Shaped[np.ndarray, " classes"]) -> dict[str, Any]:
    """Labels as JSON."""
    listed = classes.astype(str) if classes.dtype.kind == "M" else classes
    if classes.dtype.kind == "S":
        listed = np.char.decode(classes, "latin-1")
    return {"dtype": classes.dtype.str, "labels": listed.tolist()}


def classes_of(facts: dict[str, Any]) -> Shaped[np.ndarray, " classes"]:
    """Labels from the JSON of `label_facts`."""
    if not re.fullmatch(r"[<>|=]?[a-zA-Z]\d{0,6}(\[\w{1,8}\])?", str(facts["dtype"])):  # numpy would parse it as Python
        raise ValueError("labels cannot have this dtype")
    dtype, listed = np.dtype(str(facts["dtype"])), np.array(facts["labels"])
    if dtype.kind not in LABELS or dtype.itemsize > max(listed.itemsize, 4 * LETTERS):
        raise ValueError(f"labels cannot be of dtype {dtype}")
    labels = np.char.encode(listed, "latin-1").astype(dtype) if dtype.kind == "S" else listed.astype(dtype)
    if len(labels) == 0 or not np.array_equal(labels, np.unique(labels)):
        raise ValueError("labels must be one or more, in rising order")
    return labels
