"""The study of transport as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.transport.figure import BEGUN, CALLED, carried
from keyquery_studies.transport.study import TransportStudy

FROM = {
    ("published", "input"): "released: input",
    ("published", "before"): "released: before",
    ("published", "untrained"): "released: start",
    ("transformer", "untrained"): "encoder: start",
}


def lines(reading: TransportStudy) -> list[Any]:
    """Accuracy and cost of every method per dataset; trajectories of Transformers; pre-trained heads."""
    shown = list[Any]()
    for lines in (_methods(reading), _courses(reading), _starts(reading)):
        shown += [*([""] if shown and lines else []), *lines]
    return shown


def _methods(reading: TransportStudy) -> list[Any]:
    rows, shown = reading.summary(), list[Any]()
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        dataset_rows = [row for row in rows if row["dataset"] == dataset]
        table = columns_table("method", "accuracy", "gap", "CPU s", "times less", "MB")
        table.columns[0].no_wrap = True
        for row in dataset_rows:
            ours = row["method"] == "transformer"
            gap = "" if ours or row["gap"] is None else _spread(row, "gap", 3, sign="+z")
            times = "" if ours or row["times"] is None else f"{row['times']:.1f}"
            memory = "–" if row["megabytes"] is None else f"{row['megabytes']:.1f}"
            cells = (_spread(row, "accuracy", 3), gap, f"{row['seconds']:.2f}", times, memory)
            table.add_row(CALLED[row["method"]], *cells)
        best = dataset_rows[0]["best"]
        known = "" if best is None else f"; Bayes accuracy {best:.4f}"
        caption = f"{dataset}: test accuracy, {seeds_of(dataset_rows)}{known}"
        shown += [*([""] if shown else []), Text(caption, style="bold"), table]
    legend = (
        "gap: accuracy minus that of the Transformer of the same seed.",
        "per fit: CPU s, speed-up over the Transformer, and peak growth of memory in MB.",
    )
    return [*shown, *legend] if shown else []


def _courses(reading: TransportStudy) -> list[Any]:
    rows = reading.followed()
    if not rows:
        return []
    table = columns_table("Transformer", "k, i", "W₂/T", "null", "shape", "null", "matched", "efficiency")
    table.columns[0].no_wrap = True
    for row in rows:
        figures = [f"{row[name]:.3f}" for name in ("optimality", "by_lot", "shape", "shape_by_lot")]
        way = "" if row["start"] == "before" else _spread(row, "efficiency", 2)
        what = f"{row['classes']}, {row['i']}"
        table.add_row(FROM[row["network"], row["start"]], what, *figures, f"{row['matched']:.0%}", way)
    title = f"trajectories of a Transformer's points, 20 steps, {seeds_of(rows)}"
    caption = (
        "input: from the input to the output of the trained block; before: of the untrained one.",
        "start: from the output of the untrained block to that of the trained one. k classes.",
        "shape: W₂/T with class means removed at both ends.",
        "null: random partners within the class; matched: points that are their own partner.",
        "efficiency: 1 for a straight path.",
    )
    return [Text(title, style="bold"), table, *caption]


def _starts(reading: TransportStudy) -> list[Any]:
    rows = reading.starts()
    if not rows:
        return []
    table = columns_table("set", "synthetic points", "epochs", "accuracy")
    for column in table.columns[:2]:
        column.justify, column.no_wrap = "left", True
    for row in rows:
        cells = (_spread(row, "reached", 1), _spread(row, "accuracy", 3))
        table.add_row(row["dataset"], BEGUN[row["start"]], *cells)
    title = f"a head pre-trained on synthetic points, {seeds_of(rows)}"
    return [Text(title, style="bold"), table, "epochs: until three in a row reach 95 % of the Bayes accuracy."]


def _spread(row: dict[str, Any], name: str, digits: int, sign: str = "") -> str:
    spread = row[f"{name}_sd"]
    return f"{row[name]:{sign}.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


FIGURES = {"carried": carried}
