"""The study of time as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.report.gains import TITLES, WAYS
from keyquery.report.trainings import seeds_of
from keyquery.studies.time import TimeStudy


def time_tables(reading: TimeStudy, table: Callable[..., Table]) -> list[Any]:
    """One table a set: counts of the training data, then every way to know the time."""
    rows, shown = reading.summary(), list[Any]()
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        found = [row for row in rows if row["dataset"] == dataset]
        made = table("foretold by", "knows", "accuracy %", "nats, type", "gain", "nats, gap")
        for column in made.columns[:2]:
            column.justify, column.no_wrap = "left", True
        for count in reading.counts:
            if count["dataset"] == dataset:
                figures = f"{100 * count['accuracy']:.1f}", f"{count['nll_type']:.3f}", "", f"{count['nll_gap']:.3f}"
                made.add_row(count["by"], "the past", *figures)
        for row in found:
            known = {"past": "the past", "target_time": "and when it comes"}[row["information"]]
            figures = _spread(row, "accuracy", 1, 100), _spread(row, "nll_type", 3), _gain(row)
            made.add_row(WAYS[row["time"], row["how"]], known, *figures, _spread(row, "nll_gap", 3))
        said = f"{TITLES[dataset]}: groups never seen, mean of {seeds_of(found)}"
        shown += [*([""] if shown else []), Text(said, style="bold"), made]
    return [*shown, "gain: nats an event that the type is foretold better than by positions of the same seed"]


def _gain(row: dict[str, Any]) -> str:
    return "" if row["gain"] is None or row["time"] == "positions" else _spread(row, "gain", 3)


def _spread(row: dict[str, Any], name: str, digits: int, times: float = 1.0) -> str:
    spread = row[f"{name}_sd"]
    return f"{times * row[name]:.{digits}f}" + ("" if spread is None else f" ± {times * spread:.{digits}f}")
