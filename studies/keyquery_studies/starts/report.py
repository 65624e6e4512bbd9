"""The study of initialisations as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.starts.figure import curves
from keyquery_studies.starts.study import Starts


def lines(reading: Starts) -> list[Any]:
    """Losses of every start, and what each factor changes."""
    losses = columns_table("objective", "start", "steps", "rate", "loss ± sd", "seeds")
    for row in reading.starts():
        sd = "" if row["loss_sd"] is None else f" ± {row['loss_sd']:.3f}"
        cells = (row["objective"], row["start"], str(row["steps"]), f"{row['lr']:g}")
        losses.add_row(*cells, f"{row['loss']:.3f}{sd}", str(row["seeds"]))
    changes = columns_table("objective", "factor", "steps", "change [95 %]", "p")
    for row in reading.summary():
        interval = "" if row["low"] is None else f" [{row['low']:+.3f}, {row['high']:+.3f}]"
        p = "–" if row["p"] is None else f"{row['p']:.3f}"
        changes.add_row(row["objective"], row["factor"], str(row["steps"]), f"{row['change']:+.3f}{interval}", p)
    for column in (*losses.columns[:2], *changes.columns[:2]):
        column.justify, column.no_wrap = "left", True
    return [
        Text("test loss in nats per token", style="bold"),
        losses,
        "",
        Text("one factor each", style="bold"),
        changes,
    ]


FIGURES = {"curves": curves}
