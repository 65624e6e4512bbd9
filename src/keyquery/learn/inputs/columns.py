"""Columns (lists, arrays, pandas, pyarrow) to labels and times, without missing values."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from numbers import Number
from typing import Any

import numpy as np
from jaxtyping import Float64, Shaped
from torch import Tensor

from keyquery.learn.inputs.targets import LABELS, is_missing, of_one_type

SPACINGS = 100  # the median gap should be at least this many float spacings


def labels_of_column(name: str, values: Any) -> Shaped[np.ndarray, " n"]:
    """A column of labels of one type, none of them missing."""
    labels = _array(name, values)
    if labels.dtype == object:
        _refuse_missing(name, [is_missing(label) for label in labels])
        labels = of_one_type(name, labels)
    if labels.dtype.kind in "fM":
        _refuse_missing(name, np.isnan(labels) if labels.dtype.kind == "f" else np.isnat(labels))
    if labels.dtype.kind == "f" and np.isinf(labels).any():
        raise ValueError(f"{name} must hold labels, got infinity")
    if labels.dtype.kind == "f" and np.any(fractions := labels != np.round(labels)):
        raise ValueError(f"{name} must hold labels, got fractions such as {labels[fractions][0]}")
    if labels.ndim != 1 or labels.dtype.kind not in LABELS:
        received = f"{labels.dtype}" if labels.ndim == 1 else f"lists of total shape {labels.shape}"
        raise ValueError(f"{name} must hold strings or numbers, one per row, got {received}")
    return labels


def times_of(values: Any, name: str = "times") -> tuple[Float64[np.ndarray, " n"], str]:
    """Times as float64, and their clock: "numbers" unchanged, "dates" and "spans" in seconds.

    Dates with time zones are converted to UTC; dates without are taken as UTC, and cannot be mixed with others. Warns
    if distinct times become equal: integers from 2⁵³ on, and dates within a microsecond.
    """
    column = _array(name, values)
    if column.dtype == object:
        _refuse_missing(name, [is_missing(value) for value in column])
        column = _of_objects(name, column.tolist())
    clock, seconds = {"M": "dates", "m": "spans"}.get(column.dtype.kind, "numbers"), column
    if clock != "numbers":
        _refuse_missing(name, np.isnat(column))
        seconds = column.astype(f"{column.dtype.kind}8[us]").astype(np.int64) / 1e6
    if seconds.dtype.kind not in "iuf":
        hint = "; use pandas.to_datetime to parse strings" if seconds.dtype.kind in "US" else ""
        raise ValueError(f"{name} must be numbers or dates, one per row, got {seconds.dtype}{hint}")
    seconds = seconds.astype(np.float64)
    _refuse_missing(name, np.isnan(seconds))
    if np.isinf(seconds).any():
        raise ValueError(f"{name} must be finite, got infinity in row {np.isinf(seconds).argmax()}")
    _warn_of_lost_precision(name, column, seconds)
    return seconds, clock


def in_clock(times: Float64[np.ndarray, " n"], clock: str) -> Shaped[np.ndarray, " n"]:
    """Times in the user's format: numbers unchanged, seconds as UTC dates or as spans."""
    if clock == "numbers":
        return times
    return np.round(times * 1e6).astype(np.int64).astype("M8[us]" if clock == "dates" else "m8[us]")


def _array(name: str, values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if getattr(getattr(values, "dtype", None), "tz", None) is not None:  # a column of pandas with a time zone
        values = getattr(values, "dt", values).tz_convert("UTC")
        values = getattr(values, "dt", values).tz_localize(None)
    if isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a column with one value per row, got the string {values!r}")
    column = _from_list(values) if isinstance(values, (list, tuple)) else np.asarray(values)
    if column.ndim != 1:
        received = f"shape {column.shape}" if column.ndim else "None" if values is None else type(values).__name__
        raise ValueError(f"{name} must be a column with one value per row, got {received}")
    if np.ma.is_masked(values):
        _refuse_missing(name, np.ma.getmaskarray(values))
    return column if column.dtype.kind != "T" else column.astype(object)


def _from_list(values: Sequence[Any]) -> np.ndarray:
    """A list as an object array; numpy would convert mixed numbers and strings, and None, to strings."""
    if len(kinds := {type(value) for value in values}) == 1 and kinds <= {int, float, str, bool, bytes}:
        return np.array(values)
    objects = np.empty(len(values), dtype=object)
    objects[:] = values
    return objects


def _refuse_missing(name: str, missing: Any) -> None:
    rows = np.flatnonzero(missing)
    if len(rows):
        verb = "is" if len(rows) == 1 else "are"
        which = f"{len(rows)} {verb} missing, the first in row {rows[0]}"
        raise ValueError(f"{name} must have a value in every row; {which}")


def _of_objects(name: str, values: list[Any]) -> np.ndarray:
    """Dates, spans or numbers from Python, numpy or pandas scalars."""
    for clock, kinds in (("dates", (date, np.datetime64)), ("spans", (timedelta, np.timedelta64))):
        count = sum(isinstance(value, kinds) for value in values)
        if 0 < count < len(values):
            raise ValueError(f"{name} must be all {clock} or all numbers, got both")
        if count:
            return _dates(values) if clock == "dates" else np.array(values, "m8[us]")
    for value in values:
        if not isinstance(value, Number) or isinstance(value, complex):
            hint = "; use pandas.to_datetime to parse strings" if isinstance(value, (str, bytes)) else ""
            raise ValueError(f"{name} must be numbers or dates, one per row, got {type(value).__name__}{hint}")
    return np.array([float(value) for value in values])


def _dates(dates: list[Any]) -> np.ndarray:
    """Dates of Python, pandas or numpy, in UTC."""
    aware = [isinstance(moment, datetime) and moment.tzinfo is not None for moment in dates]
    if any(aware) and not all(aware):
        row = aware.index(not aware[0])
        raise ValueError(
            f"times must all have a time zone or none: {aware.count(True)} of {len(dates)} have one, and row {row} "
            "is the first that differs; localise the others"
        )
    if any(aware):
        dates = [moment.astimezone(UTC).replace(tzinfo=None) for moment in dates]
    return np.array(dates, "M8[us]")


def _warn_of_lost_precision(name: str, column: np.ndarray, seconds: Float64[np.ndarray, " n"]) -> None:
    """Warn if distinct times become equal, or if the float spacing is comparable to the gaps."""
    fine = column.dtype.kind in "mM" and np.datetime_data(column.dtype)[0] in ("ns", "ps", "fs", "as")
    large = column.dtype.kind in "iu" and len(column) and np.abs(seconds).max() > 2**53
    if (fine or large) and (lost := len(np.unique(column)) - len(np.unique(seconds))):
        remedy = "subtract the first time from all of them" if column.dtype.kind in "iu" else "pass them as numbers"
        warnings.warn(f"{lost} distinct values of {name} become equal in float64; {remedy}", stacklevel=5)
    if column.dtype.kind == "f" and column.dtype.itemsize < 8 and len(seconds):
        gaps, step = np.diff(np.unique(seconds)), float(np.spacing(np.abs(column).max()))
        if len(gaps) == 0 or np.median(gaps) < SPACINGS * step:
            resolution = f"with a resolution of {step:g} at {np.abs(seconds).max():g}"
            warnings.warn(f"{name} are {column.dtype}, {resolution}: smaller gaps are lost; use float64", stacklevel=5)
