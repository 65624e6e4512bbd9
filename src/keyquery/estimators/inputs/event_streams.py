"""Event columns in long format to streams sorted by group and time."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int, Shaped

from keyquery.estimators.inputs.columns import labels_of_column, times_of


@dataclass(frozen=True, eq=False)
class Stream:
    """Events of all groups, group by group, sorted by time.

    Group g has the rows offsets[g] to offsets[g + 1] and the name groups[g]; groups are in order of first appearance.
    `clock` is the format of times: "numbers", or seconds of "dates" (since 1970, UTC) or "spans". `moved` is the number
    of events that came after a later one of their group.
    """

    types: Shaped[np.ndarray, " n"]
    times: Float64[np.ndarray, " n"]
    offsets: Int[np.ndarray, " ends"]
    groups: Shaped[np.ndarray, " groups"]
    clock: str
    moved: int

    @property
    def lengths(self) -> Int[np.ndarray, " groups"]:
        """Number of events per group."""
        return np.diff(self.offsets)

    @property
    def last(self) -> Float64[np.ndarray, " groups"]:
        """Time of the last event per group."""
        return self.times[self.offsets[1:] - 1]

    @property
    def inside(self) -> Shaped[np.ndarray, " pairs"]:
        """Whether the next event is of the same group, (n − 1,)."""
        same = np.ones(max(len(self.times) - 1, 0), dtype=bool)
        same[self.offsets[1:-1] - 1] = False
        return same

    @property
    def gaps(self) -> Float64[np.ndarray, " pairs"]:
        """The time from each event to the next of its group."""
        return np.diff(self.times)[self.inside]


def stream_of(events: Any, times: Any = None, groups: Any = None, strict: Any = False) -> Stream:
    """Columns of equal length, arrays or pandas or pyarrow columns, to a Stream. Default groups: a single one.

    Without `times`, `events` is a data frame of the columns type, time and group, by these positions.

    >>> stream = stream_of(["in", "out", "in"], [3.0, 5.0, 4.0], ["b", "b", "a"])
    >>> stream.groups.tolist(), stream.offsets.tolist(), stream.gaps.tolist()
    (['b', 'a'], [0, 2, 3], [2.0])
    """
    if not isinstance(strict, (bool, np.bool_)):
        raise TypeError(f"strict must be True or False, got {strict!r}")
    events, times, groups = _unpacked(events, times, groups)
    types = labels_of_column("events", events)
    at, clock = times_of(times)
    names = np.zeros(len(types), dtype=np.int64) if groups is None else labels_of_column("groups", groups)
    if not len(types) == len(at) == len(names):
        listed = f"{len(types)} events, {len(at)} times" + ("" if groups is None else f" and {len(names)} groups")
        raise ValueError(f"events, times and groups must have one value per row each, got {listed}")
    if len(types) == 0:
        raise ValueError("events must hold at least one row, got none")
    if at.max() / 2 - at.min() / 2 > np.finfo(float).max / 2:
        raise ValueError(f"times must lie less than {np.finfo(float).max:.2g} apart, got {at.min():g} to {at.max():g}")
    _, first, numbers = np.unique(names, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbers = rank[numbers]
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    backwards = (np.diff(at[order]) < 0) & (np.diff(numbers[order]) == 0)
    if moved := int(backwards.sum()):
        _report_decreasing(moved, int(order[1:][backwards].min()), bool(strict), groups is None)
        order = np.lexsort((at, numbers))
    return Stream(types[order], at[order], offsets, names[np.sort(first)], clock, moved)


def longer(
    stream: Stream,
    codes: Int[np.ndarray, " n"],
    kinds: Int[np.ndarray, " groups"],
    when: Float64[np.ndarray, " groups"],
) -> tuple[Stream, Int[np.ndarray, " more"]]:
    """A stream and its type codes with one event appended to each group."""
    ends = stream.offsets[1:]
    types = np.insert(codes, ends, kinds)
    offsets = stream.offsets + np.arange(len(stream.offsets))
    return replace(stream, types=types, times=np.insert(stream.times, ends, when), offsets=offsets), types


def _unpacked(events: Any, times: Any, groups: Any) -> tuple[Any, Any, Any]:
    """The columns; those of a data frame if times are not given."""
    if times is not None:
        return events, times, groups
    if groups is not None or not hasattr(events, "columns") or len(events.columns) not in (2, 3):
        raise ValueError(
            "times must be given, unless events is a data frame of two or three columns: type, time and group"
        )
    columns = [events[name] for name in events.columns]
    return columns[0], columns[1], columns[2] if len(columns) == 3 else None


def _report_decreasing(moved: int, first: int, strict: bool, single: bool) -> None:
    hint = " as one group, since no groups were passed (GridSearchCV passes them to its splitter, not to fit)"
    problem = f"times decrease within a group at {moved} row{'s' if moved > 1 else ''}, the first of them row {first}"
    if strict:
        raise ValueError(f"{problem}, which strict=True does not allow")
    warnings.warn(f"{problem}; events were sorted by time{hint if single else ''}", UserWarning, stacklevel=5)


def learnable(stream: Stream) -> Float64[np.ndarray, " pairs"]:
    """The inter-event times; raises if they cannot be modelled.

    >>> learnable(stream_of(["a", "b", "a"], [0.0, 1.0, 4.0]))
    array([1., 3.])
    """
    gaps = stream.gaps
    if len(gaps) == 0:
        raise ValueError(f"no group has a second event: nothing to train on in {len(stream.groups)} group(s)")
    if not (gaps > 0).any():
        raise ValueError(f"times must differ within some group: all {len(gaps)} gaps are 0")
    return gaps
