"""A path compared with optimal transport, as a table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from keyquery.instruments.transport.transport import Transport
from keyquery.pages.tables import columns_table
from keyquery.report.transport.wording import MOST, heads_notes, notes, recorded

COLUMNS = {
    "points": "points",
    "distance": "distance",
    "wasserstein": "optimal",
    "random": "random",
    "monge_gap": "gap",
    "optimality": "optimality",
    "path_length": "path",
    "efficiency": "efficiency",
    "matched": "matched",
    "bures": "Gaussian",
}


def transport_lines(reading: Transport) -> list[Any]:
    """One row for all points and one per class, an explanation of the columns, and the heads that became skew."""
    rows = reading.records()
    table = columns_table("class", *COLUMNS.values())
    for row in rows[: MOST + 1]:
        table.add_row(Text(str(row["class"])), *(_cell(name, row) for name in COLUMNS))
    where = ", ".join(filter(None, [reading.model["name"], reading.model.get("module")]))
    lines: list[Any] = [Text(f"{where}: {recorded(reading)}", style="bold"), table]
    if len(rows) > MOST + 1:
        lines.append(f"The first {MOST} of {len(rows) - 1} classes; the JSON has all.")
    lines += ["", *map(Text, [*notes(reading), *heads_notes(reading)])]
    return lines


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if value is None:
        return "–"
    return f"{value:,}" if name == "points" else f"{value:.0%}" if name == "matched" else f"{value:.3g}"
