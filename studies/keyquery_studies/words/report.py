"""The study of words as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.words.figure import FILLED, STARTED, starts
from keyquery_studies.words.study import WordsStudy


def lines(reading: WordsStudy) -> list[Any]:
    """Masked-token prediction, worst method first; then steps to the goal by initialisation."""
    table = columns_table("predicted by", "median rank", "1/rank", "top 10", "seeds")
    table.columns[0].no_wrap = True
    for row in reading.summary():
        cells = (_with(row, "median", ".0f"), _with(row, "reciprocal", ".3f"), _with(row, "ten", ".1%"))
        table.add_row(FILLED.get(row["way"], row["way"]), *cells, str(row["seeds"]))
    words = reading.provenance.get("blanks", {}).get("size")
    of = f" of {words:,}" if words else ""
    shown: list[Any] = [Text(f"masked-token prediction: rank of the token{of}", style="bold"), table]
    rows, goals = reading.starts(), reading.goals()
    for objective in OBJECTIVES:
        alike = [row for row in rows if row["objective"] == objective]
        if alike:
            title = f"{objective}: steps to a loss of {goals[objective]:.2f}, {seeds_of(alike)}"
            shown += ["", Text(title, style="bold"), _starts(alike)]
    if reading.heads:
        shown += ["", Text("heads compared with the corpus, means over a layer", style="bold"), _beside(reading)]
    symmetry = ", ".join(f"{kind} {value:+z.2f}" for kind, value in reading.symmetry.items())
    return [
        *shown,
        "",
        f"Symmetry of the counts: {symmetry}.",
        "± is a standard deviation over seeds; saved: 95 %.",
    ]


def _beside(reading: WordsStudy) -> Table:
    table = columns_table("model", "layer", "symmetric", "skew", "|skew|", "explained", "above null")
    for row in reading.beside():
        beyond = f"{row['symmetric_cosine_beyond']} and {row['skew_cosine_beyond']} of {row['heads']}"
        figures = (f"{row[name]:+z.2f}" for name in ("symmetric_cosine", "skew_cosine"))
        table.add_row(
            row["model"],
            str(row["layer"]),
            *figures,
            f"{row['skew_cosine_size']:.2f}",
            f"{row['explained']:.1%}",
            beyond,
        )
    return table


def _starts(rows: list[dict[str, Any]]) -> Table:
    table = columns_table("initialisation", "steps", "saved", "final loss")
    table.columns[0].no_wrap = True
    for row in rows:
        saved = row["saved"]
        saving = "–" if saved is None else f"{saved[0]:+z.0f} ({saved[1]:+z.0f} to {saved[2]:+z.0f})"
        saving = "" if row["start"] == "random" else saving
        table.add_row(STARTED[row["start"]], _with(row, "reached", ".0f"), saving, _with(row, "loss", ".3f"))
    return table


def _with(row: dict[str, Any], name: str, form: str) -> str:
    """A mean and its standard deviation."""
    if row[name] is None:
        return "not all"
    spread = "" if row[f"{name}_sd"] is None else f" ± {row[f'{name}_sd']:{form}}"
    return f"{row[name]:{form}}{spread}"


FIGURES = {"starts": starts}
