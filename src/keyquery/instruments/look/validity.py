"""Validation of a look or comparison, also of one loaded from a file, before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from keyquery.forms.parts import PARTS
from keyquery.instruments.roles.naming import check_roles, require

MODEL = {"name": str, "layers": int, "width": int, "labels": list}
LAYER = {"layer": int, "raw.symmetry": Real, "raw.column_directionality": Real}
HEAD = {"layer": int, "head": int, "name": str, "label": str}
HEAD |= dict.fromkeys(("raw.symmetry", "raw.effective_rank", "folded.symmetry"), Real)
ON_DATA = dict.fromkeys(("symmetry", *PARTS, "interaction"), Real)
CROSS = dict.fromkeys(("pairwise", *PARTS[2:], "interaction"), Real)  # of cross-attention
TENSORS = ("same", "changed", "missing", "new")
CHANGE = {"of": str, "from": str, "notes": list, **{f"tensors.{kind}": list for kind in TENSORS}}
WORDS = {str: "a string", int: "an integer", list: "a list", Real: "a number"}
LARGEST = 100.0  # of a share or a symmetry, which are around 1
LARGEST_RANK = 1e6
LONGEST = 10_000  # items of a list on data


def check_look(model: Any, layers: Any, heads: Any) -> None:
    """Validate the facts, layers and heads of a look; the error names the missing field."""
    model = {"labels": [], **model}
    _check_fields("look: model", model, MODEL)
    require(all(isinstance(label, str) for label in model["labels"]), "look: model.labels", "strings", model["labels"])
    for name, rows, fields in (("layers", layers, LAYER), ("heads", heads, HEAD)):
        require(isinstance(rows, list) and bool(rows), f"look: {name}", "a non-empty list", rows)
        for index, row in enumerate(rows):
            _check_fields(f"look: {name}[{index}]", row, fields)
            for view in ("raw", "folded"):
                for metric in row.get(view, {}).keys() & {"symmetry", "column_directionality"}:
                    _check_metrics(f"look: {name}[{index}].{view}.{metric}", row[view][metric])
    for index, head in enumerate(heads):
        if (data := head.get("on_data")) is not None:
            crossed = isinstance(data, Mapping) and "pairwise" in data
            _check_fields(f"look: heads[{index}].on_data", data, CROSS if crossed else ON_DATA)
            _check_metrics(f"look: heads[{index}].on_data", data)
        if head.get("roles") is not None:
            check_roles(f"look: heads[{index}].roles", head["roles"])
        costs = head.get("ablation", {})
        for row in costs.values() if isinstance(costs, Mapping) else [None]:
            right = isinstance(row, list) and len(row) == 3 and all(type(x) in (int, float) for x in row)
            require(right, f"look: heads[{index}].ablation", "change, low and high by name", row)


def _check_metrics(where: str, value: Any) -> None:
    """Validate shares and intervals: numbers within bounds, lists of bounded length."""
    if isinstance(value, (list, Mapping)):
        require(isinstance(value, Mapping) or len(value) <= LONGEST, where, f"at most {LONGEST} items", "more")
        named = [(f".{key}", item) for key, item in value.items()] if isinstance(value, Mapping) else None
        for suffix, item in named or ((f"[{index}]", item) for index, item in enumerate(value)):
            _check_metrics(f"{where}{suffix}", item)
    elif type(value) in (int, float):
        limit = LARGEST_RANK if ".effective_rank" in where else LARGEST
        require(abs(value) <= limit, where, f"a number from −{limit:g} to {limit:g}", value)


def check_changes(changes: Any, looks: int) -> None:
    """Validate the changes of a comparison, if it has any."""
    right = isinstance(changes, list) and len(changes) in (0, looks - 1)
    require(right, "comparison: changes", f"a list of {looks - 1}", changes)
    for number, change in enumerate(changes):
        where, rows = f"comparison: changes[{number}]", isinstance(change, Mapping) and change.get("rows")
        _check_fields(where, change, CHANGE)
        require(rows is None or isinstance(rows, list), f"{where}.rows", "a list", rows)
        for names in change["tensors"].values():
            require(all(isinstance(name, str) for name in names), f"{where}.tensors", "lists of strings", names)
        for index, row in enumerate(rows or ()):
            _check_fields(f"{where}.rows[{index}]", row, {"layer": int, "head": int})
            for name in ("change", "symmetric", "skew", "folded"):
                value = row.get(name, "nothing")
                right = value is None or (isinstance(value, (int, float)) and value >= 0)
                require(right, f"{where}.rows[{index}].{name}", "0 or more", value)


def _check_fields(where: str, row: Any, fields: Mapping[str, type]) -> None:
    for path, kind in fields.items():
        value = row
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        require(isinstance(value, kind) and not isinstance(value, bool), f"{where}.{path}", WORDS[kind], value)
