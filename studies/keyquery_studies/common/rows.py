"""Rows of figures, as several studies put them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

FORMER = {"reciprocal": "symmetric", "directional": "skew"}  # parts of scores, as studies of former versions name them


def over_seeds(rows: Iterable[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that are alike but for the seed as one, each figure with its spread; None where a seed has none.

    >>> rows = [{"task": "a", "seed": 0, "error": 1.0}, {"task": "a", "seed": 1, "error": 3.0}]
    >>> over_seeds(rows, ["task"], ["error"])
    [{'task': 'a', 'seeds': 2, 'error': 2.0, 'error_sd': 1.4142135623730951}]
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = []
    for place, alike in groups.items():
        one: dict[str, Any] = {**dict(zip(keys, place, strict=True)), "seeds": len(alike)}
        for name in names:
            values = [row[name] for row in alike]
            there = None not in values
            one[name] = mean(values) if there else None
            one[f"{name}_sd"] = stdev(values) if there and len(values) > 1 else None
        found.append(one)
    return found


def firsts(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """All rows, in order, but only the first of those that have the same names.

    >>> firsts([{"name": "a", "loss": 1}, {"name": "b", "loss": 2}, {"name": "a", "loss": 3}], ["name"])
    [{'name': 'a', 'loss': 1}, {'name': 'b', 'loss': 2}]
    """
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), row)
    return list(found.values())
