"""Columns of times: numbers, dates or spans."""

from __future__ import annotations

import math
import warnings
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Float64, Shaped

from keyquery.learn.inputs.targets import column_of

SPACINGS = 100  # the median gap should be at least this many float spacings


def times_of(values: Any, name: str = "times") -> tuple[Float64[np.ndarray, " n"], str]:
    """Times as float64, and their clock: "numbers" unchanged, "dates" and "spans" in seconds.

    Dates with time zones are converted to UTC; dates without are taken as UTC, and cannot be mixed with others. Warns
    if distinct times become equal: integers from 2⁵³ on, and dates within a microsecond.
    """
    column = column_of(name, values)
    if column.dtype == object:
        column = _of_objects(name, column.tolist())
    clock, seconds = {"M": "dates", "m": "spans"}.get(column.dtype.kind, "numbers"), column
    if clock != "numbers":
        seconds = column.astype(f"{column.dtype.kind}8[us]").astype(np.int64) / 1e6
    if seconds.dtype.kind not in "iuf":
        hint = "; use pandas.to_datetime to parse strings" if seconds.dtype.kind in "US" else ""
        raise ValueError(f"{name} must be numbers or dates, one per row, got {seconds.dtype}{hint}")
    seconds = seconds.astype(np.float64)
    _warn_of_lost_precision(name, column, seconds)
    return seconds, clock


def in_clock(times: Float64[np.ndarray, " n"], clock: str) -> Shaped[np.ndarray, " n"]:
    """Times in the user's format: numbers unchanged, seconds as UTC dates or as spans."""
    if clock == "numbers":
        return times
    return np.round(times * 1e6).astype(np.int64).astype("M8[us]" if clock == "dates" else "m8[us]")


def _of_objects(name: str, values: list[Any]) -> np.ndarray:
    """Dates, spans or numbers from Python, numpy or pandas scalars."""
    for clock, kinds in (("dates", (date, np.datetime64)), ("spans", (timedelta, np.timedelta64))):
        count = sum(isinstance(value, kinds) for value in values)
        if 0 < count < len(values):
            raise ValueError(f"{name} must be all {clock} or all numbers, got both")
        if count:
            return _dates(values) if clock == "dates" else np.array(values, "m8[us]")
    for value in values:
        if not isinstance(value, (Real, Decimal)) or not math.isfinite(value):
            raise ValueError(f"{name} must be finite numbers or dates, one per row, got {value!r}")
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
