"""The study of transport as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.report.kit.tables import columns_table
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.transport.figure import BEGUN, CALLED
from keyquery_studies.transport.study import TransportStudy

FROM = {
    ("published", "input"): "released: input",
    ("published", "before"): "released: before",
    ("published", "untrained"): "released: start",
    ("transformer", "untrained"): "encoder: start",
}


def tables(reading: TransportStudy) -> list[Any]:
    """Accuracy and cost of every method, set by set; courses of Transformers; pre-trained heads."""
    shown = list[Any]()
    for lines in (_methods(reading), _courses(reading), _starts(reading)):
        shown += [*([""] if shown and lines else []), *lines]
    return shown


def _methods(reading: TransportStudy) -> list[Any]:
    rows, shown = reading.summary(), list[Any]()
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        found = [row for row in rows if row["dataset"] == dataset]
        made = columns_table("method", "accuracy", "gap", "CPU s", "times less", "MB")
        made.columns[0].no_wrap = True
        for row in found:
            ours = row["method"] == "transformer"
            gap = "" if ours or row["gap"] is None else _spread(row, "gap", 3, sign="+z")
            times = "" if ours or row["times"] is None else f"{row['times']:.1f}"
            memory = "–" if row["megabytes"] is None else f"{row['megabytes']:.1f}"
            cells = (_spread(row, "accuracy", 3), gap, f"{row['seconds']:.2f}", times, memory)
            made.add_row(CALLED[row["method"]], *cells)
        best = found[0]["best"]
        known = "" if best is None else f"; at best {best:.4f}"
        said = f"{dataset}: accuracy on data not seen, {seeds_of(found)}{known}"
        shown += [*([""] if shown else []), Text(said, style="bold"), made]
    legend = (
        "gap: accuracy less that of the Transformer of the same seed.",
        "CPU s, times less than the Transformer, and MB that memory rose by: of a fit.",
    )
    return [*shown, *legend] if shown else []


def _courses(reading: TransportStudy) -> list[Any]:
    rows = reading.followed()
    if not rows:
        return []
    made = columns_table("Transformer", "k, i", "W₂/T", "by lot", "shape", "by lot", "matched", "efficiency")
    made.columns[0].no_wrap = True
    for row in rows:
        figures = [f"{row[name]:.3f}" for name in ("optimality", "by_lot", "shape", "shape_by_lot")]
        way = "" if row["start"] == "before" else _spread(row, "efficiency", 2)
        what = f"{row['classes']}, {row['i']}"
        made.add_row(FROM[row["network"], row["start"]], what, *figures, f"{row['matched']:.0%}", way)
    title = f"points of a Transformer through training, 20 steps, {seeds_of(rows)}"
    said = (
        "input: from its input to what the trained block gives; before: the untrained one.",
        "start: from what it gives untrained to what it gives trained. k classes.",
        "shape: W₂/T of classes whose means are taken off at both ends.",
        "by lot: partners drawn within the class; matched: points that are their own.",
        "efficiency: 1 for a straight way.",
    )
    return [Text(title, style="bold"), made, *said]


def _starts(reading: TransportStudy) -> list[Any]:
    rows = reading.starts()
    if not rows:
        return []
    made = columns_table("set", "synthetic points", "epochs", "accuracy")
    for column in made.columns[:2]:
        column.justify, column.no_wrap = "left", True
    for row in rows:
        cells = (_spread(row, "reached", 1), _spread(row, "accuracy", 3))
        made.add_row(row["dataset"], BEGUN[row["start"]], *cells)
    title = f"a head that learned synthetic points before, {seeds_of(rows)}"
    return [Text(title, style="bold"), made, "epochs: until three in a row have 95 % of the best accuracy there is."]


def _spread(row: dict[str, Any], name: str, digits: int, sign: str = "") -> str:
    spread = row[f"{name}_sd"]
    return f"{row[name]:{sign}.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
