"""The study of masks as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.forms.parts import PARTS
from keyquery.instruments.look.show.terminal import Bar
from keyquery.pages.tables import columns_table
from keyquery_studies.mask.figure import shares
from keyquery_studies.mask.study import Masks


def lines(reading: Masks) -> list[Any]:
    """Parts of every layer in the longest window, and what each factor changes in every window."""
    seeds = len({model["seed"] for model in reading.models})
    longest = max(row["window"] for row in reading.layers())
    table = columns_table("positions", "objective", "layer", Text("parts, mean over its heads"), "symmetry")
    for row in reading.layers():
        if row["window"] == longest:
            shares = Bar([row[part] for part in PARTS])
            place = (_positions(row), row["objective"], str(row["layer"]))
            table.add_row(*place, shares, f"{row['symmetry']:+z.2f}")
    title = f"heads in windows of {longest} tokens, mean over heads and {seeds} seed{'s' if seeds > 1 else ''}"
    changes = columns_table("positions", "window", "factor", "part", "change [95 %]", "p")
    for column in (*table.columns[:2], changes.columns[0], *changes.columns[2:4]):
        column.justify, column.no_wrap = "left", True
    for row in reading.summary():
        change = "–" if row["change"] is None else f"{row['change']:+z.2f}"
        interval = "" if row["low"] is None else f" [{row['low']:+z.2f}, {row['high']:+z.2f}]"
        p = "–" if row["p"] is None else f"{row['p']:.3f}"
        changes.add_row(_positions(row), str(row["window"]), row["factor"], row["part"], change + interval, p)
    caption = "mask: masked causal less masked. objective: next token less masked causal. p by Holm."
    return [Text(title, style="bold"), table, "", Text("changes of shares", style="bold"), changes, caption]


def _positions(row: dict[str, Any]) -> str:
    return "RoPE" if row["rope"] else "learned"


FIGURES = {"shares": shares}
