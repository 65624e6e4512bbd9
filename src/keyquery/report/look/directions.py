"""The directions of each head, described by tokens, as a table in the terminal."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.look.reading import Look

MOST = 80  # rows; more would scroll the labels out of view
CELL = 35  # characters; two cells and the head fit into 80 columns


def tokens_tables(reading: Look) -> list[Any]:
    """A row per direction: the tokens at both of its ends, and query-key pairs of tokens.

    Long cells end in an ellipsis. Empty if the look has no directions.
    """
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("head", "symmetric: from one end to the other", "skew: query → key"):
        table.add_column(title, no_wrap=True)
    for head in reading.heads:
        name = Text(name_of(reading.model, head["layer"], head["head"]))
        for direction, plane in zip_longest(head.get("objects", []), head.get("relations", [])):
            table.add_row(name, _cell(_ends(direction)), _cell(_pairs(plane)))
            name = Text("")
    if table.row_count > MOST:
        return [
            Text(""),
            Text(f"{table.row_count} token directions: use --html to see all, or --layers to select some."),
        ]
    return [Text(""), table] if table.row_count else []


def _ends(direction: dict[str, Any] | None) -> str:
    if direction is None:
        return ""
    return " … ".join(" ".join(direction[end][:3]) for end in ("tokens", "opposite"))


def _pairs(plane: dict[str, Any] | None) -> str:
    return "" if plane is None else ", ".join("→".join(pair) for pair in plane["pairs"][:3])


def _cell(text: str) -> Text:
    cell = Text(text)
    cell.truncate(CELL, overflow="ellipsis")
    return cell
