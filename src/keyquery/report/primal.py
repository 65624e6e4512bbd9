"""The study of primal attention as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.report.trainings import seeds_of
from keyquery.report.worth import TITLES, Rows, called
from keyquery.studies.primal import PrimalStudy


def primal_tables(reading: PrimalStudy, table: Callable[..., Table]) -> list[Any]:
    """Accuracies on series, on the arena beside published ones, and what a step costs."""
    rows = reading.summary()
    shown: list[Any] = []
    for part, show in {"series": _series, "arena": _arena, "speed": _speed}.items():
        found = [row for row in rows if row["part"] == part]
        if found:
            shown += [*([""] if shown else []), *show(found, table)]
    return shown


def _series(rows: Rows, table: Callable[..., Table]) -> list[Any]:
    made = table("dataset", Text("attention"), Text("protocol"), Text("variant"), "accuracy %")
    for row in rows:
        made.add_row(row["dataset"], row["attention"], row["protocol"], row["variant"], _percent(row))
    return [Text(f"series: accuracy on the test, mean of {seeds_of(rows)}", style="bold"), made]


def _arena(rows: Rows, table: Callable[..., Table]) -> list[Any]:
    made = table("task", Text("attention"), "of the steps", "accuracy %", "published")
    for row in rows:
        share = f"{row['share_run']:.0%}" if row["share_run"] >= 0.01 else f"{row['share_run']:.1g}"
        made.add_row(
            TITLES[row["task"]], called(row["attention"]), share, _percent(row), f"{100 * row['published']:.1f}"
        )
    said = f"Long Range Arena: accuracy on the test, mean of {seeds_of(rows)}"
    short = [row for row in rows if row["share_run"] < 1]
    notes = []
    if any(row["schedule_run"] < 1 for row in short):
        notes.append("Runs below 100 % of the steps were cut short: the learning rate has not come down.")
    if any(row["schedule_run"] == 1 for row in short):
        notes.append("Whole runs of fewer steps have a schedule that is shorter as well.")
    return [Text(said, style="bold"), made, *notes]


def _speed(rows: Rows, table: Callable[..., Table]) -> list[Any]:
    made = table("task", Text("attention"), "ms a step", "GiB", "against fused", "against eager", "published")
    for row in rows:
        name = TITLES[row["task"]], called(row["attention"])
        if row["ms"] is None:
            made.add_row(*name, row["note"])
            continue
        memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        spread = f"{row['ms']:.2f} ({row['ms_low']:.2f}–{row['ms_high']:.2f})"
        made.add_row(*name, spread, memory, *(_times(row[key]) for key in ("faster", "faster_than_eager")), _told(row))
    said = f"a training step on {rows[0]['device']}: median (lowest–highest), and how many times as fast"
    return [Text(said, style="bold"), made, "Published ratios are against a softmax that writes every score (eager)."]


def _told(row: dict[str, Any]) -> str:
    return _times(row["published_faster"])


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _percent(row: dict[str, Any]) -> str:
    if row["accuracy"] is None:
        return "–"
    spread = row["accuracy_sd"]
    return f"{100 * row['accuracy']:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")
