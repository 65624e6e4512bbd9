"""The study of primal attention as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.primal.figure import TITLES, Rows, called, labelled, percent, worth
from keyquery_studies.primal.study import PrimalStudy


def lines(reading: PrimalStudy) -> list[Any]:
    """Accuracy on time series and, with published results, on the arena; time and memory per step."""
    rows = reading.summary()
    shown: list[Any] = []
    parts = {"series": _series, "ablation": _ablation, "arena": _arena, "speed": _speed, "text": _text}
    for part, show in parts.items():
        part_rows = [row for row in rows if row["part"] == part]
        if part_rows:
            shown += [*([""] if shown else []), *show(part_rows)]
    return shown


def _series(rows: Rows) -> list[Any]:
    table = _left(columns_table("dataset", "attention", "protocol", "accuracy %"), 3)
    for row in labelled(rows):
        table.add_row(row["dataset"], called(row["attention"]), row["protocol"], _percent(row))
    return [Text(f"time series: test accuracy, mean of {seeds_of(rows)}", style="bold"), table]


def _ablation(rows: Rows) -> list[Any]:
    table = _left(columns_table("dataset", "variant", "accuracy %"), 2)
    for row in labelled(rows):
        table.add_row(row["dataset"], row["variant"], _percent(row))
    caption = f"ablations of primal attention: test accuracy, validation split, mean of {seeds_of(rows)}"
    return [Text(caption, style="bold"), table]


def _arena(rows: Rows) -> list[Any]:
    table = _left(columns_table("task", "attention", "of the steps", "accuracy %", "published"), 2)
    for row in rows:
        share, published = percent(row["share_run"]), f"{100 * row['published']:.1f}"
        table.add_row(TITLES[row["task"]], called(row["attention"]), share, _percent(row), published)
    caption = f"Long Range Arena: test accuracy, mean of {seeds_of(rows)}"
    short = [row for row in rows if row["share_run"] < 1]
    notes = []
    if any(row["schedule_run"] < 1 for row in short):
        notes.append("Runs below 100 % of the steps were stopped early, before the learning rate had decayed.")
    if any(row["schedule_run"] == 1 for row in short):
        notes.append("Complete runs of fewer steps have a shorter schedule as well.")
    return [Text(caption, style="bold"), table, *notes]


def _text(rows: Rows) -> list[Any]:
    table = _left(columns_table("bytes", "steps", "attention", "rate", "seeds", "accuracy %"), 3)
    for row in rows:
        sizes = (f"{row['length']:,}", f"{row['steps']:,}")
        table.add_row(*sizes, row["attention"], f"{row['lr']:g}", str(row["seeds"]), _percent(row))
    return [Text("Text beside the released layer: test accuracy by bytes of a text", style="bold"), table]


def _speed(rows: Rows) -> list[Any]:
    table = _left(columns_table("task", "attention", "ms per step", "busy", "GiB", "fused", "eager", "paper"), 2)
    for row in rows:
        name = TITLES[row["task"]], called(row["attention"])
        if row["ms"] is None:
            table.add_row(*name, "does not fit")
            continue
        memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        spread = f"{_three(row['ms'])} ({_three(row['ms_low'])}–{_three(row['ms_high'])})"
        busy = "–" if row["busy_ms"] is None else _three(row["busy_ms"])
        ratios = (_times(row[key]) for key in ("faster", "faster_than_eager", "published_faster"))
        table.add_row(*name, spread, busy, memory, *ratios)
    caption = f"training step on {rows[0]['device']}: median (lowest–highest)"
    note = "busy: ms that the GPU is busy. fused, eager: speed-up over that softmax; paper: the published "
    note += "one, over a softmax that materialises every score, like eager."
    return [Text(caption, style="bold"), table, note]


def _left(table: Table, count: int) -> Table:
    """Left-align the first columns, which hold text."""
    for column in table.columns[:count]:
        column.justify, column.no_wrap = "left", True
    return table


def _three(value: float) -> str:
    """One decimal below 100, else none."""
    return f"{value:.{1 if value < 100 else 0}f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.{2 if value < 10 else 1}f}×"


def _percent(row: dict[str, Any]) -> str:
    if row["accuracy"] is None:
        return "–"
    spread = row["accuracy_sd"]
    return f"{100 * row['accuracy']:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


FIGURES = {"worth": worth}
