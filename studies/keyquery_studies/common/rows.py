"""Helpers for result rows that several studies share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

FORMER = {"reciprocal": "symmetric", "directional": "skew"}  # names of score parts in studies of former versions


def over_seeds(rows: Iterable[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Means over seeds with standard deviations; None where a seed has no value."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    means = []
    for place, alike in groups.items():
        row_of_means: dict[str, Any] = {**dict(zip(keys, place, strict=True)), "seeds": len(alike)}
        for name in names:
            values = [row[name] for row in alike]
            complete = None not in values
            row_of_means[name] = mean(values) if complete else None
            row_of_means[f"{name}_sd"] = stdev(values) if complete and len(values) > 1 else None
        means.append(row_of_means)
    return means


def firsts(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """All rows, in order, without duplicates by `names`."""
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        first.setdefault(tuple(row[name] for name in names), row)
    return list(first.values())
