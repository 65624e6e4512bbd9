"""Roles of the heads of a look in the terminal: a column of its tables, and a table per role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from keyquery.instruments.look.reading import Look
from keyquery.report.roles.rule import role_name, rule
from keyquery.report.roles.terminal import role_table


def has_roles(look: Look) -> bool:
    """Whether roles were measured."""
    return any("roles" in head for head in look.heads)


def roles_of(heads: Sequence[Mapping[str, Any]]) -> str:
    """The most specific role of each head, counted if several heads share it."""
    counts = Counter(role_name(role) for head in heads if (role := head.get("roles", {}).get("role")))
    return ", ".join(role if count == 1 else f"{count} {role}" for role, count in counts.most_common())


def role_tables(reading: Look) -> list[Any]:
    """A row per role with its strongest heads; empty if roles were not measured."""
    if not has_roles(reading):
        return []
    heads = [{**head, **head["roles"]} for head in reading.heads if "roles" in head]
    facts = reading.provenance.get("roles") or {}
    notes = [f"Note: {note}." for note in facts.get("notes", [])]
    title = f"{reading.model['name']}: heads by role"
    return [Text(""), Text(title, style="bold"), role_table(heads, reading.model), *rule(facts), *notes]
