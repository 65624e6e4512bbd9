"""The table of fields that ships: from the rows of a sweep, which fields move scores, and what values are proven."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keyquery.checkpoints.configs import types
from keyquery.checkpoints.configs.fields import flat
from keyquery.proof.models import model_types
from keyquery.support.files import write_all
from tools.architectures.defaults import aliases_of, defaults_of

FILE = Path(types.__file__).with_name("types.jsonl.xz")
BAD = ("wrong", "missing layers", "ignored")  # what is refused is refused by the reader itself
GIVEN = {"model_type", "transformers_version", "architectures", "rope.rope_theta"}


def write(rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the table of all types."""
    lines, of_type = [json.dumps(["", version("transformers")])], by_type(rows)
    for name in sorted(model_types()):
        defaults = defaults_of(name)
        moves, others, *rest = facts(of_type.get(name, []))
        others = sorted({*others, *(defaults.keys() - (moves or {}).keys())})  # where older configs state them
        lines.append(json.dumps([name, defaults, moves, others, *rest, aliases_of(name)], ensure_ascii=False))
    write_all({FILE: lzma.compress("\n".join(lines).encode(), preset=9)})


def by_type(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each type."""
    of_type: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        of_type.setdefault(row["type"], []).append(row)
    return of_type


def facts(rows: list[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Of a type: fields that move scores with their proven values, the others, pairs, patterns of tensors, ignored."""
    tensors = sorted({pattern for row in rows for pattern in row.get("tensors", [])})
    tried = Tried.of(rows)
    if tried is None:
        return None, [], [], tensors, []
    moves = {name: tried.proven(name) for name in tried.moving()}
    others = sorted((tried.known | tried.values.keys() | GIVEN) - moves.keys())
    return moves, others, tried.pairs(), tensors, tried.ignored()


class Tried:
    """The values of fields that were tried: alone or together, with what came of it."""

    def __init__(self, listing: Mapping[str, Any]) -> None:
        self.known = {name for name, _ in flat(listing["defaults"])} | {*listing["fields"], *listing["names"]}
        self.base: dict[str, list[Any]] = {"rope.rope_type": ["default"]}
        for name, value in (*flat(listing["defaults"]), *flat(listing["base"])):
            self.base.setdefault(name, []).append(value)
        self.base.setdefault("rope_theta", []).extend(self.base.get("rope.rope_theta", []))  # as older configs have it
        self.values: dict[str, list[tuple[Any, str]]] = {}  # by field, with the status
        self._alone: dict[str, set[str]] = {}  # by field, the statuses where it alone was changed
        self._bad: list[dict[str, list[Any]]] = []

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Tried | None:
        """What was tried of a type; None if its default config is not read exactly, or not all was tried."""
        listing: Mapping[str, Any] = next((row for row in rows if row.get("list")), {})
        variants = {json.dumps(row["change"], sort_keys=True): row for row in rows if "change" in row}
        missing = [
            change for change in listing.get("changes", [{}]) if json.dumps(change, sort_keys=True) not in variants
        ]
        if missing or "changes" not in listing or variants["{}"]["status"] != "exact":
            return None
        tried = cls(listing)
        for row in variants.values():
            if row["status"] != "cannot be built":
                tried.add(row["change"], row["status"])
        return tried

    def add(self, change: Mapping[str, Any], status: str) -> None:
        """A variant and its status."""
        changed: dict[str, list[Any]] = {}
        for name, value in flat(change):
            if value not in self.base.get(name, []):
                changed.setdefault(name, []).append(value)
        for name, values in changed.items():
            self.values.setdefault(name, []).extend((value, status) for value in values)
        if len(changed) == 1:
            self._alone.setdefault(next(iter(changed)), set()).add(status)
        if changed and status in BAD:
            self._bad.append(changed)

    def changed(self, change: Mapping[str, Any]) -> set[str]:
        """The fields that differ from the default config."""
        return {name for name, value in flat(change) if value not in self.base.get(name, [])}

    def moving(self) -> list[str]:
        """Fields that move scores, alone or together with others, or that are read wrongly."""
        moving = {name for name, tried in self.values.items() if {status for _, status in tried} - {"inert", "refused"}}
        return sorted(moving - set(self.ignored()))

    def ignored(self) -> list[str]:
        """Fields that the type's models do not look at, though the reader would."""
        return sorted(
            name
            for name, came in self._alone.items()
            if "ignored" in came
            and came <= {"ignored", "inert"}
            and "exact" not in {s for _, s in self.values[name]}
            and not re.search("head|size|dim|width|layers", name)  # a default would stand for it
        )

    def proven(self, name: str) -> list[Any] | None:
        """The values of a field that are proven: those that were tried, or any where all of them are numbers."""
        good = [value for value, status in self.values[name] if status in ("exact", "inert")]
        values = [*self.base.get(name, [None]), *good]
        entries = [entry for value in values for entry in (value if isinstance(value, list) and value else [value])]
        entries += [True, False] if any(isinstance(value, bool) for value in good) else []
        if good and name not in self.blamed() and all(map(_is_number, entries)):
            return None
        unique = {json.dumps(entry, sort_keys=True): entry for entry in entries}
        return list(unique.values())

    def blamed(self) -> set[str]:
        """Fields of which no value of a wrong reading is in one that is right, or no number is."""
        return {name for changed in self._bad for name in self._blame(changed)}

    def _blame(self, changed: Mapping[str, list[Any]]) -> list[str]:
        good = {name: [v for v, s in self.values[name] if s in ("exact", "inert")] for name in changed}
        return [
            name
            for name, values in changed.items()
            if len(changed) == 1 or not good[name] or not (set(map(_kind, values)) <= set(map(_kind, good[name])))
        ]

    def pairs(self) -> list[dict[str, Any]]:
        """Values that are read wrongly together, and of which none is to blame alone."""
        return [{name: values[0] for name, values in bad.items()} for bad in self._bad if not self._blame(bad)]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _kind(value: Any) -> str:
    """A value, or that it is a number, or numbers."""
    numbers = value if isinstance(value, list) and value else [value]
    return "number" if value is not None and all(map(_is_number, numbers)) else json.dumps(value, sort_keys=True)
