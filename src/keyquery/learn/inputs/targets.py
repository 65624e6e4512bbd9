"""Targets: labels of classes and numbers, validated; labels to JSON and back."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int, Shaped
from torch import Tensor

from keyquery.support.extras import optional

LABELS = {"i": "number", "u": "number", "f": "number", "b": "bool", "U": "text", "S": "bytes", "M": "date"}
LETTERS = 1024  # a saved label's dtype may be this wide even if every label is shorter


def labels_of(name: str, y: Any, count: int, what: str = "y") -> Shaped[np.ndarray, " n"]:
    """Validated class labels (n,) of an estimator: one per sample, none missing; `what` names them in errors."""
    labels = _column(name, y, count, what)
    if labels.dtype == object:
        if any(map(is_missing, labels)):
            raise ValueError(f"{what} must have a label for every sample, got None or NaN")
        labels = of_one_type(what, labels)
    if labels.dtype.kind in "fM" and not np.all(np.isfinite(labels)):
        raise ValueError(f"{what} must have a label for every sample, got NaN, NaT or infinity")
    type_of_target = optional("sklearn.utils.multiclass", name).type_of_target
    if labels.dtype.kind not in LABELS or (labels.dtype.kind == "f" and type_of_target(labels) == "continuous"):
        raise ValueError(
            f"Unknown label type: {what} must hold classes, got {labels.dtype} such as {labels.tolist()[0]!r}"
        )
    return labels


def numbers_of(name: str, y: Any, count: int) -> Float64[np.ndarray, " n"]:
    """Validated regression targets (n,) of an estimator: one finite number per sample."""
    check_array = optional("sklearn.utils.validation", name).check_array
    return check_array(_column(name, y, count), dtype=np.float64, ensure_2d=False, input_name="y")


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


def rows_of_weight(name: str, sample_weight: Any, count: int) -> Int[np.ndarray, " kept"] | None:
    """The rows whose weight is above 0; None if all are."""
    if sample_weight is None:
        return None
    kept = np.flatnonzero(weights_of(name, np.zeros(count), sample_weight) > 0)
    return kept if len(kept) < count else None


def kept_of(y: Any, kept: Shaped[np.ndarray, " some"], count: int) -> Any:
    """Some of the targets, by index or by mask; y itself if it is not one value per row, which is refused later."""
    if y is None or np.ndim(y) != 1 or len(y) != count:
        return y
    rows = np.arange(count)[kept]
    if isinstance(y, (list, tuple)):
        return [y[row] for row in rows]
    return y.iloc[rows] if hasattr(y, "iloc") else y[rows]


def _column(name: str, y: Any, count: int, what: str = "y") -> Shaped[np.ndarray, " n"]:
    """One value per sample, of any dtype, with the errors and the warning of scikit-learn."""
    if y is None:
        raise ValueError(f"{name} requires {what} to be passed, but the target {what} is None")
    if np.ma.is_masked(y):
        raise ValueError(f"{what} must have a value for every sample, got masked ones")
    validation = optional("sklearn.utils.validation", name)
    values = y.detach().cpu() if isinstance(y, Tensor) else y
    # Lists become objects: numpy would convert mixed types to text. pandas' integers stay integers as an array.
    array = np.asarray(values, object if isinstance(y, (list, tuple)) else None)
    column = validation.column_or_1d(array, warn=True)
    validation.check_consistent_length(range(count), column)
    return column


def dense(X: Any) -> Any:
    """X, a tensor as an array; sparse matrices and lazy frames are refused."""
    if hasattr(X, "toarray") or (isinstance(X, Tensor) and X.layout not in (torch.strided, torch.jagged)):
        remedy = "X.to_dense()" if isinstance(X, Tensor) else "X.toarray()"
        raise TypeError(f"X is a sparse matrix; dense data is required: use {remedy}")
    if type(X).__name__ == "LazyFrame":
        raise TypeError("X is a lazy frame, whose rows are not known yet: pass X.collect()")
    if not isinstance(X, Tensor) or X.is_nested:
        return X
    return (X.double() if X.is_floating_point() else X).detach().cpu().numpy()  # numpy has no bfloat16


def is_missing(value: Any) -> bool:
    """Whether a value is missing: None, NaN, or pandas' NA and NaT."""
    # NA equals nothing, not even False.
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def of_one_type(name: str, labels: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n ..."]:
    """An object array of labels as an array of their common type; of more dimensions if labels are lists."""
    if len({LABELS.get(np.asarray(label).dtype.kind) for label in labels}) > 1:
        names = sorted({type(label).__name__ for label in labels})
        raise ValueError(f"{name} must hold labels of one type, got {', '.join(names)}")
    return np.array(labels.tolist())


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
    if labels.ndim != 1 or len(np.unique(labels)) != len(labels):
        raise ValueError("labels must be a list without duplicates")
    return labels
