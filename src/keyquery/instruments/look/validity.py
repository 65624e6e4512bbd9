"""Validation of a look, also of one loaded from a file, before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from keyquery.forms.parts import PARTS
from keyquery.instruments.roles.naming import check_roles

MODEL = {"name": str, "layers": int, "width": int, "labels": list}
LAYER = {"layer": int, "raw.symmetry": Real, "raw.column_directionality": Real}
HEAD = {"layer": int, "head": int, "name": str, "label": str}
HEAD |= dict.fromkeys(("raw.symmetry", "raw.effective_rank", "folded.symmetry"), Real)
ON_DATA = dict.fromkeys(("symmetry", *PARTS, "interaction"), Real)
CROSS = dict.fromkeys(("pairwise", *PARTS[2:], "interaction"), Real)
TENSORS = ("same", "changed", "missing", "new")
CHANGE = {"of": str, "from": str, "notes": list, **{f"tensors.{kind}": list for kind in TENSORS}}
LARGEST = 100.0  # of a share or a symmetry, which are around 1
LARGEST_RANK = 1e6
LONGEST = 10_000  # items of a list on data


def check_look(model: Any, layers: Any, heads: Any) -> None:
    """Validate the facts, layers and heads of a look; the error names the missing field."""
    _check("model", {"labels": [], **model}, MODEL)
    if not all(isinstance(label, str) for label in model.get("labels", [])):
        raise ValueError(f"not a look: model.labels must be a list of strings, got {model['labels']!r:.60}")
    for name, rows, fields in (("layers", layers, LAYER), ("heads", heads, HEAD)):
        if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
            raise ValueError(f"not a look: {name} must be a non-empty list, got {rows!r:.60}")
        for index, row in enumerate(rows):
            _check(f"{name}[{index}]", row, fields)
            for view in ("raw", "folded"):
                for metric in ("symmetry", "column_directionality"):
                    _check_share(f"{name}[{index}].{view}.{metric}", row.get(view, {}).get(metric))
    for index, head in enumerate(heads):
        if (data := head.get("on_data")) is not None:
            # Cross-attention has no symmetric and skew part.
            crossed = isinstance(data, Mapping) and "pairwise" in data
            _check(f"heads[{index}].on_data", data, CROSS if crossed else ON_DATA)
            _check_metrics(f"heads[{index}].on_data", data)
        if head.get("roles") is not None:
            check_roles(f"heads[{index}].roles", head["roles"], "look")
        _check_costs(f"heads[{index}].ablation", head.get("ablation", {}))


def _check_costs(where: str, costs: Any) -> None:
    """Validate the costs of a head: change, low and high by name."""
    for row in costs.values() if isinstance(costs, Mapping) else [None]:
        if not (isinstance(row, list) and len(row) == 3 and all(type(x) in (int, float) for x in row)):
            raise ValueError(f"not a look: {where} must have change, low and high by name, got {row!r:.60}")


def _check_metrics(where: str, value: Any) -> None:
    """Validate shares and intervals: numbers within bounds, lists of bounded length."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_metrics(f"{where}.{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) > LONGEST:
            raise ValueError(f"not a look: {where} must have at most {LONGEST} items, got {len(value)}")
        for index, item in enumerate(value):
            _check_metrics(f"{where}[{index}]", item)
    elif isinstance(value, Real):
        _check_share(where, value)


def _check_share(where: str, value: Any) -> None:
    limit = LARGEST_RANK if ".effective_rank" in where else LARGEST
    if value is not None and not (type(value) in (int, float) and abs(value) <= limit):
        raise ValueError(f"not a look: {where} must be a number from −{limit:g} to {limit:g}, got {value!r:.60}")


def check_changes(changes: Any, looks: int) -> None:
    """Validate the changes of a comparison, if it has any."""
    if not isinstance(changes, list) or len(changes) not in (0, looks - 1):
        raise ValueError(f"not a comparison: changes must be a list of {looks - 1}, got {changes!r:.60}")
    for number, change in enumerate(changes):
        where, fields = f"changes[{number}]", CHANGE
        if isinstance(change, Mapping) and change.get("rows") is not None:
            fields = {**CHANGE, "rows": list}
        _check(where, change, fields, "comparison")
        if not all(isinstance(tensor, str) for names in change["tensors"].values() for tensor in names):
            raise ValueError(f"not a comparison: {where}.tensors must be lists of strings")
        for index, row in enumerate(change.get("rows") or ()):
            _check(f"{where}.rows[{index}]", row, {"layer": int, "head": int}, "comparison")
            for name in ("change", "symmetric", "skew", "folded"):
                value = row.get(name, "nothing")
                if value is not None and (not isinstance(value, (int, float)) or value < 0):
                    problem = f"{where}.rows[{index}].{name} must be 0 or more, got {value!r:.60}"
                    raise ValueError(f"not a comparison: {problem}")


def _check(where: str, row: Any, fields: Mapping[str, type], what: str = "look") -> None:
    for path, kind in fields.items():
        value = row
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = {str: "a string", int: "an integer", list: "a list"}.get(kind, "a number")
            raise ValueError(f"not a {what}: {where}.{path} must be {wanted}, got {value!r:.60}")
