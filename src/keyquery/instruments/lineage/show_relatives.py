"""The relatives of a model in the terminal and as a page."""

from __future__ import annotations

from typing import Any

from keyquery.instruments.lineage.evidence import p_text
from keyquery.instruments.lineage.index import Relatives
from keyquery.instruments.lineage.show import CAVEAT
from keyquery.pages.components import column, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import Text, columns_table
from keyquery.support.printable import counted, printable

LISTED = 10  # relatives


def lines(reading: Relatives) -> list[Any]:
    """The nearest models of an index."""
    facts = f"{reading.searched} searched, {reading.comparable} of a comparable shape"
    lines: list[Any] = [Text(f"relatives of {printable(reading.model)}: {facts}", style="bold")]
    table = columns_table("model", "related", "p (adjusted)", "basis-free", "shared basis")
    for row in reading.rows[:LISTED]:
        statistics = ("–" if row[name] is None else f"{row[name]:.1f}" for name in ("basis_free", "shared_basis"))
        table.add_row(printable(row["model"]), "yes" if row["related"] else "no", p_text(row["p"]), *statistics)
    return [*lines, table, "", CAVEAT] if reading.rows else [*lines, "", CAVEAT]


def page(reading: Relatives) -> str:
    """The page: how many models are related, and all that were tested in full."""
    related = sum(bool(row["related"]) for row in reading.rows)
    sentence = f"{counted(related, 'model')} of {reading.searched} shares weights with {reading.model}."
    columns = [
        column("model", [row["model"] for row in reading.rows]),
        column("related", ["yes" if row["related"] else "no" for row in reading.rows]),
        column("p (adjusted)", [p_text(row["p"]) for row in reading.rows], order=[row["p"] for row in reading.rows]),
        column("basis-free", [row["basis_free"] for row in reading.rows]),
        column("shared basis", [row["shared_basis"] for row in reading.rows]),
    ]
    blocks = [
        {"type": "summary", "sentences": [sentence]},
        {"type": "table", "title": "Nearest models", "note": "statistics: sd of the null", "columns": columns},
    ]
    facts = f"{reading.searched} searched, {reading.comparable} of a comparable shape"
    notes = versioned([CAVEAT, *reading.skipped], reading.provenance)
    return document(reading.model, "relatives", [{"blocks": blocks}], facts, notes)
