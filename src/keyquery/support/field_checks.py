"""Check the content of a reading's file against the fields and types of its class, before it is constructed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Indices that determine the size of grids in reports, and their largest values.
PLACES = {"layer": 4095, "layers": 4096, "head": 4095, "target": 10**6}
WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}


def check_fields(cls: type[Any], data: Mapping[str, Any]) -> None:
    """Require exactly the fields of a dataclass, each of its type, with indices within bounds."""
    known = {f.name: f for f in fields(cls)}
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"unknown field {unknown[0]!r:.60}; its fields are {', '.join(known)}")
    hints = get_type_hints(cls)
    for name, f in known.items():
        if name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"the field {name!r} is missing")
        if name in data:
            _check(data[name], hints[name], name)
    check_places(data, "")


def check_places(value: Any, where: str) -> None:
    """Refuse indices of layers, heads and targets that are too large for a report."""
    if isinstance(value, dict):
        for key, item in value.items():
            most = PLACES.get(key)
            if most is not None and isinstance(item, int) and not 0 <= item <= most:
                raise ValueError(f"{where}{key} must be from 0 to {most}, got {item!r:.40}")
            check_places(item, f"{where}{key}."[-60:])
    elif isinstance(value, list) and not {dict, list}.isdisjoint(map(type, value)):
        for item in value:
            check_places(item, where)


def _check(value: Any, hint: Any, where: str) -> None:
    """Require plain JSON data to match a type hint: a sequence is a list, a mapping an object."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        _check_any(value, inner, where)
    elif origin is Literal:
        _require(value in inner, f"one of {inner}", value, where)
    elif origin in WORDS:
        right = isinstance(value, (int, float) if origin is float else origin)
        _require(right and (isinstance(value, bool) == (origin is bool)), WORDS[origin], value, where)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        _require(isinstance(value, dict), "an object", value, where)
        for key, item in value.items() if inner and inner[1] is not Any else ():
            _check(item, inner[1], f"{where}.{key:.40}")
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        _require(isinstance(value, list), "a list", value, where)
        fixed = issubclass(origin, tuple) and Ellipsis not in inner and inner
        _require(not fixed or len(value) == len(inner), f"a list of {len(inner)}", value, where)
        for index, item in enumerate(value if inner and inner[0] is not Any else ()):
            _check(item, inner[index if fixed else 0], f"{where}[{index}]")


def _check_any(value: Any, hints: Sequence[Any], where: str) -> None:
    problems = []
    for hint in hints:
        try:
            return _check(value, hint, where)
        except ValueError as error:
            problems.append(error)
    raise problems[0]


def _require(right: bool, words: str, value: Any, where: str) -> None:
    if not right:
        if isinstance(value, (list, dict)):  # show only the first items
            value = dict(list(value.items())[:3]) if isinstance(value, dict) else value[:3]
        raise ValueError(f"{where} must be {words}, got {value!r:.60}")
