"""Event columns in long format to streams sorted by group and time."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int, Shaped

from keyquery.learn.inputs.columns import labels_of_column, times_of
from keyquery.learn.inputs.targets import weights_of


@dataclass(frozen=True, eq=False)
class Stream:
    """Events of all groups, group by group, sorted by time.

    Group g has the rows offsets[g] to offsets[g + 1] and the name groups[g]; groups are in order of first appearance.
    `clock` is the format of times: "numbers", or seconds of "dates" (since 1970, UTC) or "spans". `moved` is the number
    of events that came after a later one of their group. `rows` are the rows of the user's columns.
    """

    types: Shaped[np.ndarray, " n"]
    times: Float64[np.ndarray, " n"]
    offsets: Int[np.ndarray, " ends"]
    groups: Shaped[np.ndarray, " groups"]
    clock: str
    moved: int
    rows: Int[np.ndarray, " n"]
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
    """Columns of equal length, arrays or pandas or pyarrow columns, to a Stream. Default groups: a single one."""
    if not isinstance(strict, (bool, np.bool_)):
        raise TypeError(f"strict must be True or False, got {strict!r}")
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
    return Stream(types[order], at[order], offsets, names[np.sort(first)], clock, moved, order)


def longer(
    stream: Stream,
    codes: Int[np.ndarray, " n"],
    kinds: Int[np.ndarray, " groups"],
    when: Float64[np.ndarray, " groups"],
    inputs: Float32[np.ndarray, "groups k"] | None = None,
) -> tuple[Stream, Int[np.ndarray, " more"]]:
    """A stream and its type codes with one event appended to each group, with the covariates `inputs`."""
    ends = stream.offsets[1:]
    types, rows = np.insert(codes, ends, kinds), np.insert(stream.rows, ends, -1)
    parts: dict[str, Any] = {"offsets": stream.offsets + np.arange(len(stream.offsets)), "rows": rows}
    if inputs is not None and stream.inputs is not None:
        parts["inputs"] = np.insert(stream.inputs, ends, inputs, axis=0)
    return replace(stream, types=types, times=np.insert(stream.times, ends, when), **parts), types


def unpacked(events: Any, times: Any, groups: Any, covariates: Any = None) -> tuple[Any, Any, Any, Any]:
    """The columns and covariates; without `times`, those of a data frame of type, time, group and covariates."""
    if times is not None:
        return events, times, groups, covariates
    if groups is not None or not hasattr(events, "columns") or len(events.columns) < 2:
        raise ValueError(
            "times must be given, unless events is a data frame with the columns type, time, group and covariates"
        )
    names = list(events.columns)
    columns = [events[name] for name in names[:3]]
    if len(names) > 3 and covariates is not None:
        raise ValueError(f"covariates must be the columns of events after the third, {len(names) - 3}, or be passed")
    covariates = events[names[3:]] if len(names) > 3 else covariates
    return columns[0], columns[1], columns[2] if len(columns) == 3 else None, covariates


def _report_decreasing(moved: int, first: int, strict: bool, single: bool) -> None:
    hint = " as one group, since no groups were passed (GridSearchCV passes them to its splitter, not to fit)"
    problem = f"times decrease within a group at {moved} row{'s' if moved > 1 else ''}, the first of them row {first}"
    if strict:
        raise ValueError(f"{problem}, which strict=True does not allow")
    warnings.warn(f"{problem}; events were sorted by time{hint if single else ''}", UserWarning, stacklevel=5)


def learnable(stream: Stream) -> Float64[np.ndarray, " pairs"]:
    """The inter-event times; raises if they cannot be modelled."""
    gaps = stream.gaps
    if len(gaps) == 0:
        raise ValueError(f"no group has a second event: nothing to train on in {len(stream.groups)} group(s)")
    if not (gaps > 0).any():
        raise ValueError(f"times must differ within some group: all {len(gaps)} gaps are 0")
    return gaps


def weights_of_events(stream: Stream, sample_weight: Any) -> Float64[np.ndarray, " n"] | None:
    """Weights in the order of the stream, with mean 1 over the events that are predicted; None for equal weights."""
    if sample_weight is None:
        return None
    given = weights_of("EventModel", np.zeros(len(stream.rows)), sample_weight)[stream.rows]
    first = np.zeros(len(given), dtype=bool)
    first[stream.offsets[:-1]] = True
    if not (given[~first] > 0).any():
        raise ValueError("sample_weight must not be 0 for all events that follow another")
    return given / given[~first].mean()


def seen(stream: Stream, windows: int) -> dict[str, int]:
    """Counts of what a model was trained on."""
    return {
        "events": len(stream.rows),
        "groups": len(stream.groups),
        "groups of one event": int((stream.lengths == 1).sum()),  # no next event to train on
        "sorted": stream.moved,
        "gaps of 0": int((stream.gaps == 0).sum()),
        "windows": windows,
    }
