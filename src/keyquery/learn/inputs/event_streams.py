"""Event columns in long format to streams sorted by group and time; columns of times: numbers, dates or spans."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Shaped

from keyquery.learn.inputs.targets import column_of, labels_of_column, weights_of

SPACINGS = 100  # the median gap should be at least this many float spacings


@dataclass(frozen=True, eq=False)
class Stream:
    """Events group by group, in order of first appearance, and sorted by time: group g from offsets[g] on."""

    types: Shaped[np.ndarray, " n"]  # labels, or their codes
    times: Float64[np.ndarray, " n"]
    offsets: Int[np.ndarray, " ends"]
    groups: Shaped[np.ndarray, " groups"]  # their names
    clock: str  # format of times: "numbers", or seconds of "dates" (since 1970, UTC) or "spans"
    rows: Int[np.ndarray, " n"]  # of the user's columns
    inputs: Float32[np.ndarray, "n k"] | None = None  # encoded covariates
    weights: Float64[np.ndarray, " n"] | None = None  # of the prediction of each event

    @property
    def lengths(self) -> Int[np.ndarray, " groups"]:
        """Number of events per group."""
        return np.diff(self.offsets)

    @property
    def last(self) -> Float64[np.ndarray, " groups"]:
        """Time of the last event per group."""
        return self.times[self.offsets[1:] - 1]

    @property
    def owners(self) -> Int[np.ndarray, " n"]:
        """The number of each event's group."""
        return np.repeat(np.arange(len(self.groups)), self.lengths)

    @property
    def inside(self) -> Bool[np.ndarray, " pairs"]:
        """Whether the next event is of the same group, (n − 1,)."""
        return np.diff(self.owners) == 0

    @property
    def gaps(self) -> Float64[np.ndarray, " pairs"]:
        """The time from each event to the next of its group."""
        return np.diff(self.times)[self.inside]


def stream_of(events: Any, times: Any = None, groups: Any = None) -> Stream:
    """Columns of equal length, arrays or pandas or pyarrow columns, to a Stream. Default groups: a single one."""
    types = labels_of_column("events", events)
    when, clock = times_of(times)
    names = np.zeros(len(types), dtype=np.int64) if groups is None else labels_of_column("groups", groups)
    if not len(types) == len(when) == len(names):
        listed = f"{len(types)} events, {len(when)} times" + ("" if groups is None else f" and {len(names)} groups")
        raise ValueError(f"events, times and groups must have one value per row each, got {listed}")
    if len(types) == 0:
        raise ValueError("events must hold at least one row, got none")
    _, first, numbers = np.unique(names, return_index=True, return_inverse=True)
    numbers = first.argsort().argsort()[numbers]
    order = np.argsort(numbers, kind="stable")
    backwards = (np.diff(when[order]) < 0) & (np.diff(numbers[order]) == 0)
    if moved := int(backwards.sum()):
        row, plural = int(order[1:][backwards].min()), "s" if moved > 1 else ""
        hint = " as one group, since no groups were passed (GridSearchCV passes them to its splitter, not to fit)"
        problem = f"times decrease within a group at {moved} row{plural}, the first of them row {row}"
        warnings.warn(f"{problem}; events were sorted by time{hint if groups is None else ''}", stacklevel=4)
        order = np.lexsort((when, numbers))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(numbers))))
    return Stream(types[order], when[order], offsets, names[np.sort(first)], clock, order)


def longer(
    stream: Stream,
    types: Int[np.ndarray, " groups"],
    times: Float64[np.ndarray, " groups"],
    inputs: Float32[np.ndarray, "groups k"] | None = None,
) -> Stream:
    """A stream with one event appended to each group, with the covariates `inputs`."""
    ends, offsets = stream.offsets[1:], stream.offsets + np.arange(len(stream.offsets))
    types, rows, times = (
        np.insert(column, ends, new)
        for column, new in ((stream.types, types), (stream.rows, -1), (stream.times, times))
    )
    if inputs is not None and stream.inputs is not None:
        inputs = np.insert(stream.inputs, ends, inputs, axis=0)
    return replace(stream, types=types, times=times, offsets=offsets, rows=rows, inputs=inputs)


def unpacked(events: Any, times: Any, groups: Any, covariates: Any = None) -> tuple[Any, Any, Any, Any]:
    """The columns and covariates; without `times`, those of a data frame of type, time, group and covariates."""
    if times is not None:
        return events, times, groups, covariates
    if groups is not None or not hasattr(events, "columns") or len(events.columns) < 2:
        raise ValueError("times must be given, unless events is a data frame of type, time, group and covariates")
    names = list(events.columns)
    if len(names) > 3:
        if covariates is not None:
            count = len(names) - 3
            raise ValueError(f"covariates must be the columns of events after the third, {count}, or be passed")
        covariates = events[names[3:]]
    return events[names[0]], events[names[1]], events[names[2]] if len(names) > 2 else None, covariates


def times_per_group(name: str, moments: Any, stream: Stream) -> Float64[np.ndarray, " groups"]:
    """A time for each group, none before its last event; a single time is that of all."""
    last, single = stream.last, np.ndim(moments) == 0
    when, clock = times_of([moments] if single else moments, name)
    when = np.repeat(when, len(last)) if single else when
    if len(when) != len(last):
        raise ValueError(f"{name} must hold a time for each of {len(last)} groups, got {len(when)}")
    if clock != stream.clock:
        raise ValueError(f"{name} must be {stream.clock}, like times, got {clock}")
    if early := int((when < last).sum()):
        raise ValueError(f"{name} must not be before a group's last event; {early} of {len(when)} are")
    return when


def weights_of_events(stream: Stream, sample_weight: Any) -> Float64[np.ndarray, " n"] | None:
    """Weights in the order of the stream, with mean 1 over the events that are predicted; None for equal weights."""
    if sample_weight is None:
        return None
    given = weights_of("EventModel", np.zeros(len(stream.rows)), sample_weight)[stream.rows]
    predicted = np.delete(given, stream.offsets[:-1])
    if not (predicted > 0).any():
        raise ValueError("sample_weight must not be 0 for all events that follow another")
    return given / predicted.mean()


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
        have = f"{aware.count(True)} of {len(dates)} have one, and row {row} is the first that differs"
        raise ValueError(f"times must all have a time zone or none: {have}")
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
