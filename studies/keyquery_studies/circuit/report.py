"""The study of the copying circuit as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from keyquery.pages.tables import columns_table
from keyquery_studies.circuit.figure import followed
from keyquery_studies.circuit.study import Circuit

NOTE = (
    "Costs in nats per token on repeated random tokens; 95 % intervals over sequences, or over seeds if trained here. "
    "p by Holm over all contrasts; – where both sides copy nothing (floor) or a side was not measured."
)


def lines(reading: Circuit) -> list[Any]:
    """What the weights alone show of roles, and the contrasts between parts and controls."""
    return [_weights(reading), "", _contrasts(reading), NOTE]


def _weights(reading: Circuit) -> Table:
    table = columns_table("model", "role", "named", "area under ROC [95 %]", "rank correlation [95 %]")
    for row in reading.weights_alone():
        named = f"{row['named']} of {row['heads']}"
        table.add_row(row["model"], row["role"], named, _interval(row["area"], 2), _interval(row["correlation"], 2))
    return table


def _contrasts(reading: Circuit) -> Table:
    table = columns_table("model", "head", "contrast", "Δ [95 %]", "p")
    for row in reading.summary():
        p = "–" if row["p"] is None else f"{row['p']:.2g}"
        contrast = f"{row['role']}: {row['first']} − {row['second']}"
        table.add_row(row["model"], row["head"], contrast, _interval(row, 3), p)
    return table


def _interval(row: Mapping[str, Any] | None, digits: int) -> str:
    if row is None or row.get("change") is None:
        return "–"
    change, low, high = (f"{row[key]:.{digits}f}" for key in ("change", "low", "high"))
    return f"{change} [{low}, {high}]"


FIGURES = {"followed": followed}
