"""Helpers for result rows that several studies share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

FORMER = {"reciprocal": "symmetric", "directional": "skew"}  # names of score parts in studies of former versions


def over_seeds(rows: Iterable[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Means over seeds with standard deviations; None where a seed has no value.

    >>> rows = [{"task": "a", "seed": 0, "error": 1.0}, {"task": "a", "seed": 1, "error": 3.0}]
    >>> over_seeds(rows, ["task"], ["error"])
    [{'task': 'a', 'seeds': 2, 'error': 2.0, 'error_sd': 1.4142135623730951}]
    """
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
    """All rows, in order, without duplicates by `names`.

    >>> firsts([{"name": "a", "loss": 1}, {"name": "b", "loss": 2}, {"name": "a", "loss": 3}], ["name"])
    [{'name': 'a', 'loss': 1}, {'name': 'b', 'loss': 2}]
    """
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        first.setdefault(tuple(row[name] for name in names), row)
    return list(first.values())
