"""The study of words as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.report.kit.tables import columns_table
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.words.figure import FILLED, STARTED
from keyquery_studies.words.study import WordsStudy


def tables(reading: WordsStudy) -> list[Any]:
    """How blanks were filled, worst first; then every start's steps to the goal."""
    made = columns_table("blanks filled by", "median rank", "1/rank", "among ten", "seeds")
    made.columns[0].no_wrap = True
    for row in reading.summary():
        cells = (_with(row, "median", ".0f"), _with(row, "reciprocal", ".3f"), _with(row, "ten", ".1%"))
        made.add_row(FILLED.get(row["way"], row["way"]), *cells, str(row["seeds"]))
    words = reading.provenance.get("blanks", {}).get("size")
    of = f" of {words:,}" if words else ""
    shown: list[Any] = [Text(f"the token that stood in a blank: its rank{of}", style="bold"), made]
    rows, goals = reading.starts(), reading.goals()
    for objective in OBJECTIVES:
        alike = [row for row in rows if row["objective"] == objective]
        if alike:
            title = f"{objective}: steps to a loss of {goals[objective]:.2f}, {seeds_of(alike)}"
            shown += ["", Text(title, style="bold"), _starts(alike)]
    if reading.heads:
        shown += ["", Text("heads beside the corpus, means over a layer", style="bold"), _beside(reading)]
    symmetry = ", ".join(f"{kind} {value:+z.2f}" for kind, value in reading.symmetry.items())
    return [
        *shown,
        "",
        f"Symmetry of what was counted: {symmetry}.",
        "± is a standard deviation over seeds; saved: 95 %.",
    ]


def _beside(reading: WordsStudy) -> Table:
    made = columns_table("model", "layer", "compares", "points", "size", "explained", "beyond chance")
    for row in reading.beside():
        beyond = f"{row['compares_beyond']} and {row['points_beyond']} of {row['heads']}"
        figures = (f"{row[name]:+z.2f}" for name in ("compares", "points"))
        made.add_row(
            row["model"], str(row["layer"]), *figures, f"{row['points_size']:.2f}", f"{row['explained']:.1%}", beyond
        )
    return made


def _starts(rows: list[dict[str, Any]]) -> Table:
    made = columns_table("start", "steps", "saved", "loss in the end")
    made.columns[0].no_wrap = True
    for row in rows:
        saved = row["saved"]
        told = "–" if saved is None else f"{saved[0]:+z.0f} ({saved[1]:+z.0f} to {saved[2]:+z.0f})"
        told = "" if row["start"] == "random" else told
        made.add_row(STARTED[row["start"]], _with(row, "reached", ".0f"), told, _with(row, "loss", ".3f"))
    return made


def _with(row: dict[str, Any], name: str, form: str) -> str:
    """A mean and its spread."""
    if row[name] is None:
        return "not all"
    spread = "" if row[f"{name}_sd"] is None else f" ± {row[f'{name}_sd']:{form}}"
    return f"{row[name]:{form}}{spread}"
