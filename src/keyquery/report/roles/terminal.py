"""Head roles in the terminal: the heads of each role with their scores, and how roles were named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.roles.naming import decided
from keyquery.instruments.roles.patterns import ROLES
from keyquery.instruments.roles.roles import Roles
from keyquery.pages.tables import columns_table
from keyquery.report.roles.rule import measured_on, role_name, rule

MOST = 6  # heads that are listed per role


def roles_lines(reading: Roles) -> list[Any]:
    """Title, a row per role with its strongest heads, and the rule by which roles are named."""
    model = reading.model
    title = f"{model['name']}: roles of {len(reading.heads)} heads in {model['layers']} layers"
    lines: list[Any] = [
        Text(title, style="bold"),
        Text(f"on {measured_on(reading)}", style="dim"),
        "",
        role_table(reading.heads, model),
        "",
    ]
    return [*lines, *rule(reading.provenance), *(f"Note: {note}." for note in reading.notes)]


def role_table(heads: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> Table:
    """A row per role: how many heads are named so, the range of null levels, and the strongest of these heads.

    `heads` have the fields `roles` and `scores`.
    """
    table = columns_table("role", "heads", Text("on"), "null", Text("strongest, ± half of the 95 % interval"))
    for role in ROLES:
        scored = [head for head in heads if role in head["scores"]]
        data = decided(role, scored[0]["scores"][role]) if scored else None
        if data is None:
            continue
        rows = [(head, head["scores"][role][data]) for head in scored if data in head["scores"][role]]
        levels = [row["null"] for _, row in rows]
        named = sorted((pair for pair in rows if role in pair[0]["roles"]), key=lambda pair: -pair[1]["score"])
        shown = [_strength(name_of(model, head["layer"], head["head"]), row) for head, row in named[:MOST]]
        more = [f"and {len(named) - MOST} more"] if len(named) > MOST else []
        low, high = (f"{end(levels):.2f}" for end in (min, max))
        table.add_row(
            role_name(role),
            str(len(named)),
            Text(data),
            low if low == high else f"{low}–{high}",
            Text(", ".join([*shown, *more]) or "–"),
        )
    return table


def _strength(name: str, row: Mapping[str, Any]) -> str:
    if row["low"] is None:
        return f"{name} {row['score']:.2f}"
    return f"{name} {row['score']:.2f} ±{(row['high'] - row['low']) / 2:.2f}"
