"""Result rows: selections, groups, and means over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

Row = Mapping[str, Any]
FORMER = {"reciprocal": "symmetric", "directional": "skew"}  # names of score parts in studies of former versions


def selected(rows: Iterable[Row], **facts: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in facts.items())]


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by their values of `keys`, in order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def over_seeds(rows: Iterable[Row], keys: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Means over seeds with standard deviations; None where a seed has no value."""
    means = []
    for group, alike in grouped(rows, keys).items():
        row: dict[str, Any] = {**dict(zip(keys, group, strict=True)), "seeds": len(alike)}
        for name in names:
            values = [one[name] for one in alike]
            complete = None not in values
            row[name] = mean(values) if complete else None
            row[f"{name}_sd"] = stdev(values) if complete and len(values) > 1 else None
        means.append(row)
    return means


def firsts(rows: Iterable[Row], names: Sequence[str]) -> list[Row]:
    """All rows, in order, without duplicates by `names`."""
    return [alike[0] for alike in grouped(rows, names).values()]
