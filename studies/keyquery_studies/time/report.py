"""The study of time as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.report.kit.tables import columns_table
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.time.figure import TITLES, WAYS, way_of
from keyquery_studies.time.study import TimeStudy


def tables(reading: TimeStudy) -> list[Any]:
    """One table a set: counts of the training data, then every way to know the time."""
    rows, shown = reading.summary(), list[Any]()
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        found = [row for row in rows if row["dataset"] == dataset]
        made = columns_table("foretold by", "knows", "accuracy", "type, nats", "gain", "gap, nats")
        for column in made.columns[:2]:
            column.justify, column.no_wrap = "left", True
        for count in reading.counts:
            if count["dataset"] == dataset:
                accuracy, kind, gap = (f"{count[name]:.3f}" for name in ("accuracy", "nll_type", "nll_gap"))
                made.add_row(count["by"], "past", accuracy, kind, "", gap)
        for row in found:
            known = {"past": "past", "target_time": "and its time"}[row["information"]]
            accuracy, kind, gap = (_spread(row, name) for name in ("accuracy", "nll_type", "nll_gap"))
            gain = "" if row["gain"] is None or row["time"] == "positions" else _spread(row, "gain")
            made.add_row(WAYS[way_of(row)], known, accuracy, kind, gain, gap)
        said = f"{TITLES[dataset]}: groups never seen, mean of {seeds_of(found)}"
        shown += [*([""] if shown else []), Text(said, style="bold"), made]
    return [*shown, "gain: nats an event that the type is foretold better than by positions of the same seed"]


def _spread(row: dict[str, Any], name: str) -> str:
    spread = row[f"{name}_sd"]
    return f"{row[name]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
