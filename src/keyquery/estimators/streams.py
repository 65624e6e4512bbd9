"""Timed events as users have them, long columns with a group for each row, to streams sorted by group and time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from jaxtyping import Float64, Int, Shaped
from torch import Tensor

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, eq=False)
class Stream:
    """Events of all groups, one group after the other, each in the order of time.

    Group g has the rows from offsets[g] up to offsets[g + 1] and the name groups[g]; groups stand in the order in which
    they first appear. `clock` says what times are: "numbers" as they were given, or seconds, of "dates" (since 1970,
    UTC) or "spans". `moved` counts the events that were given behind a later one of their group.
    """

    types: Shaped[np.ndarray, " n"]
    times: Float64[np.ndarray, " n"]
    offsets: Int[np.ndarray, " ends"]
    groups: Shaped[np.ndarray, " groups"]
    clock: str
    moved: int

    @property
    def lengths(self) -> Int[np.ndarray, " groups"]:
        """How many events each group has."""
        return np.diff(self.offsets)

    @property
    def last(self) -> Float64[np.ndarray, " groups"]:
        """When each group's last event was."""
        return self.times[self.offsets[1:] - 1]

    @property
    def inside(self) -> Shaped[np.ndarray, " pairs"]:
        """True for each event but the last that the next one is of the same group, (n − 1,)."""
        same = np.ones(max(len(self.times) - 1, 0), dtype=bool)
        same[self.offsets[1:-1] - 1] = False
        return same

    @property
    def gaps(self) -> Float64[np.ndarray, " pairs"]:
        """The time from each event to the next of its group."""
        return np.diff(self.times)[self.inside]


def stream_of(events: Any, times: Any, groups: Any = None, strict: bool = False) -> Stream:
    """Columns of equal length, arrays or columns of pandas or pyarrow, to a Stream; without groups all is one.

    >>> stream = stream_of(["in", "out", "in"], [3.0, 5.0, 4.0], ["b", "b", "a"])
    >>> stream.groups.tolist(), stream.offsets.tolist(), stream.gaps.tolist()
    (['b', 'a'], [0, 2, 3], [2.0])
    """
    types = labels_of_column("events", events)
    at, clock = times_of(times)
    names = np.zeros(len(types), dtype=np.int64) if groups is None else labels_of_column("groups", groups)
    if not len(types) == len(at) == len(names):
        listed = f"{len(types)} events, {len(at)} times" + ("" if groups is None else f" and {len(names)} groups")
        raise ValueError(f"events, times and groups must have one value a row each, got {listed}")
    if len(types) == 0:
        raise ValueError("events must hold at least one row, got none")
    _, first, numbers = np.unique(names, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbers = rank[numbers]
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    backwards = (np.diff(at[order]) < 0) & (np.diff(numbers[order]) == 0)
    if moved := int(backwards.sum()):
        _tell_backwards(moved, int(order[1:][backwards].min()), strict)
        order = np.lexsort((at, numbers))
    return Stream(types[order], at[order], offsets, names[np.sort(first)], clock, moved)


def longer(
    stream: Stream,
    codes: Int[np.ndarray, " n"],
    kinds: Int[np.ndarray, " groups"],
    when: Float64[np.ndarray, " groups"],
) -> tuple[Stream, Int[np.ndarray, " more"]]:
    """A stream, by the numbers of its types, with one event more at the end of each group."""
    ends = stream.offsets[1:]
    made = np.insert(codes, ends, kinds)
    offsets = stream.offsets + np.arange(len(stream.offsets))
    return replace(stream, types=made, times=np.insert(stream.times, ends, when), offsets=offsets), made


def _tell_backwards(moved: int, first: int, strict: bool) -> None:
    said = f"times decrease within a group at {moved} row{'s' if moved > 1 else ''}, the first of them row {first}"
    if strict:
        raise ValueError(f"{said}: with strict=True they must not")
    warnings.warn(f"{said}; events were sorted by time", UserWarning, stacklevel=5)


def labels_of_column(name: str, values: Any) -> Shaped[np.ndarray, " n"]:
    """A column of labels of one type, none of them missing.

    >>> labels_of_column("events", ["a", None])
    Traceback (most recent call last):
    ValueError: events must have a value in every row; 1 is missing, the first in row 1
    """
    found = _array(name, values)
    if found.dtype == object:
        _refuse_missing(name, [label is None or label != label for label in found])
        kinds = sorted({type(label).__name__ for label in found})
        if len(kinds) > 1:
            raise ValueError(f"{name} must hold labels of one type, got {', '.join(kinds)}")
        found = np.array(found.tolist())
    if found.dtype.kind == "f":
        _refuse_missing(name, ~np.isfinite(found))
        if np.any(found != np.round(found)):
            raise ValueError(f"{name} must hold labels, got fractions such as {found[found != np.round(found)][0]}")
    if found.ndim != 1 or found.dtype.kind not in "biufUSM":
        raise ValueError(f"{name} must hold texts or numbers, one a row, got {found.dtype} of shape {found.shape}")
    return found


def learnable(stream: Stream, classes: Shaped[np.ndarray, " classes"]) -> Float64[np.ndarray, " pairs"]:
    """The gaps, where something can be learned of them and of types.

    >>> learnable(stream_of(["a", "b", "a"], [0.0, 1.0, 4.0]), np.array(["a", "b"]))
    array([1., 3.])
    """
    gaps = stream.gaps
    if len(gaps) == 0:
        raise ValueError(f"no group has a second event: {len(stream.groups)} groups of one event each teach nothing")
    if len(classes) < 2:
        raise ValueError(f"events hold only one type, {classes[0].item()!r}: a model of the next one needs two or more")
    if not (gaps > 0).any():
        raise ValueError(f"times must differ within some group: all {len(gaps)} gaps are 0")
    return gaps


def times_of(values: Any) -> tuple[Float64[np.ndarray, " n"], str]:
    """Times as float64, and the clock they are of: numbers as they are, dates and spans in seconds.

    Dates with time zones become UTC, whatever their zones; dates without are taken as UTC, and do not go with others.

    >>> times_of(np.array(["1970-01-02", "1970-01-01T00:00:00.5"], dtype="datetime64[ms]"))
    (array([8.64e+04, 5.00e-01]), 'dates')
    """
    found = _array("times", values)
    clock = {"M": "dates", "m": "spans"}.get(found.dtype.kind, "numbers")
    if found.dtype == object:
        _refuse_missing("times", [one is None or one != one for one in found])
        if len(found) and all(isinstance(one, datetime) for one in found):
            found, clock = _seconds(list(found)), "dates"
        else:
            found = _numbers(found)
    elif clock != "numbers":
        _refuse_missing("times", np.isnat(found))
        found = found.astype(f"{found.dtype.kind}8[us]").astype(np.int64) / 1e6
    if found.dtype.kind not in "iuf" or found.ndim != 1:
        raise ValueError(
            f"times must be numbers or dates, one a row, got {found.dtype} of shape {found.shape}"
            + ("; pandas.to_datetime reads texts" if found.dtype.kind in "US" else "")
        )
    found = found.astype(np.float64)
    _refuse_missing("times", ~np.isfinite(found))
    return found, clock


def told(times: Float64[np.ndarray, " n"], clock: str) -> Shaped[np.ndarray, " n"]:
    """Times as they are given out: numbers as they are, seconds as dates in UTC or as spans.

    >>> told(np.array([0.5]), "dates")
    array(['1970-01-01T00:00:00.500000'], dtype='datetime64[us]')
    """
    if clock == "numbers":
        return times
    return np.round(times * 1e6).astype(np.int64).astype("M8[us]" if clock == "dates" else "m8[us]")


def _array(name: str, values: Any) -> np.ndarray:
    if values is None:
        raise ValueError(f"{name} must be a column with one value a row, got None")
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if getattr(getattr(values, "dtype", None), "tz", None) is not None:  # a column of pandas with a time zone
        values = (values.dt if hasattr(values, "dt") else values).tz_convert("UTC")
        values = (values.dt if hasattr(values, "dt") else values).tz_localize(None)
    if isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a column with one value a row, got the text {values!r}")
    if isinstance(values, (list, tuple)):
        return _from_list(values)
    found = np.asarray(values)
    return found if found.dtype.kind != "T" else found.astype(object)


def _from_list(values: Sequence[Any]) -> np.ndarray:
    """A list as it is: numpy would turn numbers beside texts into texts, and nothing into a text too."""
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


def _numbers(values: Any) -> np.ndarray:
    if any(isinstance(one, datetime) for one in values):
        raise ValueError("times must be all dates or all numbers, got both")
    if any(isinstance(one, (str, bytes)) for one in values):
        raise ValueError("times must be numbers or dates, got texts; pandas.to_datetime reads them")
    if len(values) and isinstance(values[0], np.datetime64 | np.timedelta64):
        return np.array(list(values)).astype(f"{np.array(list(values)).dtype.kind}8[us]").astype(np.int64) / 1e6
    return np.array([float(one) for one in values])


def _seconds(dates: list[datetime]) -> Float64[np.ndarray, " n"]:
    aware = [date.tzinfo is not None for date in dates]
    if any(aware) and not all(aware):
        where = aware.index(not aware[0])
        with_zone = aware.count(True)
        raise ValueError(
            f"times must all have a time zone or none: {with_zone} of {len(dates)} have one, and row {where} is the "
            "first that differs; localise the others"
        )
    return np.array(
        [
            ((date if zoned else date.replace(tzinfo=UTC)) - EPOCH).total_seconds()
            for date, zoned in zip(dates, aware, strict=True)
        ]
    )
