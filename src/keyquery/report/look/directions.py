"""The directions of each head by their tokens, as a table in the terminal."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.look.look import Look

MOST = 80  # lines that leave the labels in sight
CELL = 35  # two of them and the head fit into 80 columns


def tokens_tables(reading: Look) -> list[Any]:
    """A line for each direction that was described: the tokens at both its ends, and pairs of query and key.

    Long cells end in an ellipsis. Nothing where nothing was described.
    """
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("head", "symmetric: from one end to the other", "skew: query → key"):
        table.add_column(title, no_wrap=True)
    for head in reading.heads:
        name = Text(name_of(reading.model, head["layer"], head["head"]))
        for one, other in zip_longest(head.get("objects", []), head.get("relations", [])):
            table.add_row(name, _cell(_ends(one)), _cell(_pairs(other)))
            name = Text("")
    if table.row_count > MOST:
        return [
            Text(""),
            Text(f"{table.row_count} directions by their tokens: on the page (--html), or --layers for few."),
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
