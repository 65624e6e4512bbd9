"""Columns (lists, arrays, pandas, pyarrow) to labels and times, without missing values."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from numbers import Number
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from keyquery.estimators.inputs.targets import LABELS, is_missing, of_one_type

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHORT = 100  # the median gap should be at least this many float spacings


def labels_of_column(name: str, values: Any) -> Shaped[np.ndarray, " n"]:
    """A column of labels of one type, none of them missing.

    >>> labels_of_column("events", ["a", None])
    Traceback (most recent call last):
    ValueError: events must have a value in every row; 1 is missing, the first in row 1
    """
    found = _array(name, values)
    if found.dtype == object:
        _refuse_missing(name, [is_missing(label) for label in found])
        found = of_one_type(name, found)
    if found.dtype.kind in "fM":
        _refuse_missing(name, np.isnan(found) if found.dtype.kind == "f" else np.isnat(found))
    if found.dtype.kind == "f" and np.any(fractions := found != np.round(found)):
        raise ValueError(f"{name} must hold labels, got fractions such as {found[fractions][0]}")
    if found.dtype.kind == "f" and np.isinf(found).any():
        raise ValueError(f"{name} must hold labels, got infinity")
    if found.ndim != 1 or found.dtype.kind not in LABELS:
        given = f"{found.dtype}" if found.ndim == 1 else f"lists, in all of shape {found.shape}"
        raise ValueError(f"{name} must hold texts or numbers, one a row, got {given}")
    return found


def times_of(values: Any, name: str = "times") -> tuple[Float64[np.ndarray, " n"], str]:
    """Times as float64, and their clock: "numbers" unchanged, "dates" and "spans" in seconds.

    Dates with time zones are converted to UTC; dates without are taken as UTC, and cannot be mixed with others. Warns
    if distinct times become equal: integers from 2⁵³ on, and dates within a microsecond.

    >>> times_of(np.array(["1970-01-02", "1970-01-01T00:00:00.5"], dtype="datetime64[ms]"))
    (array([8.64e+04, 5.00e-01]), 'dates')
    """
    given = _array(name, values)
    clock = {"M": "dates", "m": "spans"}.get(given.dtype.kind, "numbers")
    if given.dtype == object:
        _refuse_missing(name, [is_missing(one) for one in given])
        given, clock = _of_objects(name, given.tolist())
    found = given
    if found.dtype.kind in "mM":
        _refuse_missing(name, np.isnat(found))
        found = _microseconds(name, found).astype(np.int64) / 1e6
    if found.dtype.kind not in "iuf":
        hint = "; pandas.to_datetime reads texts" if found.dtype.kind in "US" else ""
        raise ValueError(f"{name} must be numbers or dates, one a row, got {found.dtype}{hint}")
    found = found.astype(np.float64)
    _refuse_missing(name, np.isnan(found))
    if len(infinite := np.flatnonzero(np.isinf(found))):
        raise ValueError(
            f"{name} must be finite; {len(infinite)} of {len(found)} are not, the first in row {infinite[0]}"
        )
    _tell_lost(name, given, found)
    return found, clock


def told(times: Float64[np.ndarray, " n"], clock: str) -> Shaped[np.ndarray, " n"]:
    """Times in the user's format: numbers unchanged, seconds as UTC dates or as spans.

    >>> told(np.array([0.5]), "dates")
    array(['1970-01-01T00:00:00.500000'], dtype='datetime64[us]')
    """
    if clock == "numbers":
        return times
    return np.round(times * 1e6).astype(np.int64).astype("M8[us]" if clock == "dates" else "m8[us]")


def _array(name: str, values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        if values.dtype == torch.bfloat16:
            raise ValueError(f"{name} must be of a dtype that numpy has, got torch.bfloat16; convert before")
        values = values.detach().cpu().numpy()
    if getattr(getattr(values, "dtype", None), "tz", None) is not None:  # a column of pandas with a time zone
        values = (values.dt if hasattr(values, "dt") else values).tz_convert("UTC")
        values = (values.dt if hasattr(values, "dt") else values).tz_localize(None)
    if isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a column with one value a row, got the text {values!r}")
    found = _from_list(values) if isinstance(values, (list, tuple)) else np.asarray(values)
    if found.ndim != 1:
        given = f"shape {found.shape}" if found.ndim else "None" if values is None else type(values).__name__
        raise ValueError(f"{name} must be a column with one value a row, got {given}")
    if np.ma.is_masked(values):
        _refuse_missing(name, np.ma.getmaskarray(values))
    return found if found.dtype.kind != "T" else found.astype(object)


def _from_list(values: Sequence[Any]) -> np.ndarray:
    """A list as an object array; numpy would convert numbers beside texts, and None, to texts."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    plain = {type(value) for value in values} if len(values) else {float}
    return np.array(values) if len(plain) == 1 and plain <= {int, float, str, bool, bytes} else found


def _refuse_missing(name: str, missing: Any) -> None:
    rows = np.flatnonzero(missing)
    if len(rows):
        verb = "is" if len(rows) == 1 else "are"
        raise ValueError(
            f"{name} must have a value in every row; {len(rows)} {verb} missing, the first in row {rows[0]}"
        )


def _of_objects(name: str, values: list[Any]) -> tuple[np.ndarray, str]:
    """Dates, spans or numbers from Python, numpy or pandas scalars."""
    dates = [isinstance(one, (date, np.datetime64)) for one in values]
    spans = [isinstance(one, (timedelta, np.timedelta64)) for one in values]
    for kind, clock, found in ((dates, "dates", _seconds), (spans, "spans", _spans)):
        if any(kind) and not all(kind):
            raise ValueError(f"{name} must be all {clock} or all numbers, got both")
        if any(kind):
            return found(values), clock
    if any(isinstance(one, (str, bytes)) for one in values):
        raise ValueError(f"{name} must be numbers or dates, got texts; pandas.to_datetime reads them")
    for one in values:
        if not isinstance(one, Number) or isinstance(one, complex):
            hint = "; a time of day has no date" if isinstance(one, time) else ""
            raise ValueError(f"{name} must be numbers or dates, one a row, got {type(one).__name__}{hint}")
    try:
        return np.array([float(one) for one in values]), "numbers"
    except OverflowError:
        raise ValueError(f"{name} must be numbers that float64 holds, got one of more than 1.8e308") from None


def _seconds(dates: list[Any]) -> Float64[np.ndarray, " n"]:
    if isinstance(dates[0], np.datetime64):
        return _microseconds("times", np.array(dates)).astype(np.int64) / 1e6
    dates = [one if isinstance(one, datetime) else datetime(one.year, one.month, one.day) for one in dates]
    aware = [one.tzinfo is not None for one in dates]
    if any(aware) and not all(aware):
        where = aware.index(not aware[0])
        raise ValueError(
            f"times must all have a time zone or none: {aware.count(True)} of {len(dates)} have one, and row {where} "
            "is the first that differs; localise the others"
        )
    return np.array(
        [
            ((one if zoned else one.replace(tzinfo=UTC)) - EPOCH).total_seconds()
            for one, zoned in zip(dates, aware, strict=True)
        ]
    )


def _spans(spans: list[Any]) -> Float64[np.ndarray, " n"]:
    return np.array(
        [one / np.timedelta64(1, "s") if isinstance(one, np.timedelta64) else one.total_seconds() for one in spans]
    )


def _microseconds(name: str, found: np.ndarray) -> np.ndarray:
    """Dates and spans in microseconds; raises if they overflow."""
    kind = found.dtype.kind
    if np.datetime_data(found.dtype)[0] == "generic":
        raise ValueError(f"{name} must have a unit, such as timedelta64[s], got {found.dtype}")
    fine, coarse = found.astype(f"{kind}8[us]"), "M8[Y]" if kind == "M" else "m8[D]"
    if np.any(fine.astype(coarse) != found.astype(coarse)):
        raise ValueError(f"{name} must lie within 290,000 years of 1970, got {found.min()} to {found.max()}")
    return fine


def _tell_lost(name: str, given: np.ndarray, found: Float64[np.ndarray, " n"]) -> None:
    """Warn if distinct times become equal, or if the float spacing is comparable to the gaps."""
    fine = given.dtype.kind in "mM" and np.datetime_data(given.dtype)[0] in ("ns", "ps", "fs", "as")
    large = given.dtype.kind in "iu" and len(given) and np.abs(found).max() > 2**53
    if (fine or large) and (lost := len(np.unique(given)) - len(np.unique(found))):
        remedy = "subtract the first of them before" if given.dtype.kind in "iu" else "give them as numbers"
        warnings.warn(f"{name} hold {lost} that differ and become the same in float64; {remedy}", stacklevel=5)
    if given.dtype.kind == "f" and given.dtype.itemsize < 8 and len(found):
        gaps, step = np.diff(np.unique(found)), float(np.spacing(np.abs(given).max()))
        if len(gaps) == 0 or np.median(gaps) < SHORT * step:
            warnings.warn(
                f"{name} are {given.dtype}, whose steps are {step:g} at {np.abs(found).max():g}: gaps below are lost; "
                "give float64",
                stacklevel=5,
            )
