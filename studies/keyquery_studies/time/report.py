"""The study of time as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.common.rows import over_seeds
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.time.figure import NAMES, TITLES, WAYS, gains, way_of
from keyquery_studies.time.study import FIGURES as METRICS
from keyquery_studies.time.study import TimeStudy


def lines(reading: TimeStudy) -> list[Any]:
    """One table per dataset: counting baselines, then every time encoding."""
    rows, shown = reading.summary(), list[Any]()
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        dataset_rows = [row for row in rows if row["dataset"] == dataset]
        table = columns_table("predicted by", "given", "accuracy", "type, nats", "gain", "gap, nats")
        for column in table.columns[:2]:
            column.justify, column.no_wrap = "left", True
        for count in reading.counts:
            if count["dataset"] == dataset:
                accuracy, kind, gap = (f"{count[name]:.3f}" for name in ("accuracy", "nll_type", "nll_gap"))
                table.add_row(count["by"], "past", accuracy, kind, "", gap)
        for row in dataset_rows:
            known = {"past": "past", "target_time": "and its time"}[row["information"]]
            accuracy, kind, gap = (_spread(row, name) for name in ("accuracy", "nll_type", "nll_gap"))
            gain = "" if row["gain"] is None or row["time"] == "positions" else _spread(row, "gain")
            table.add_row(WAYS[way_of(row)], known, accuracy, kind, gain, gap)
        caption = f"{TITLES[dataset]}: unseen groups, mean of {seeds_of(dataset_rows)}"
        shown += [*([""] if shown else []), Text(caption, style="bold"), table]
    if rows:
        shown += ["gain: nats per event over positions of the same seed, in predicting the type"]
    return [*shown, *([""] if rows else []), *_arms(reading)] if reading.arms else shown


def _arms(reading: TimeStudy) -> list[Any]:
    """Where time enters: means of the arms, and their differences."""
    means = over_seeds(reading.arms, ("dataset", "arm", "lr", "parameters"), METRICS)
    table = columns_table("dataset", "time as", "rate", "type, nats", "gap, nats", "seeds")
    for row in means:
        nats = (_spread(row, name) for name in METRICS[1:])
        table.add_row(TITLES[row["dataset"]], NAMES[row["arm"]], f"{row['lr']:g}", *nats, str(row["seeds"]))
    changes = columns_table("dataset", "of", "arm", "less", "nats", "95 %", "corrected p")
    for row in reading.contrasts():
        if row["p"] is not None:
            interval, p = f"{row['low']:+.3f} to {row['high']:+.3f}", f"{row['corrected']:.3f}"
            names = (TITLES[row["dataset"]], row["of"].removeprefix("nll_"), row["arm"], row["less"])
            changes.add_row(*names, f"{row['change']:+.3f}", interval, p)
    return [Text("where time enters", style="bold"), table, changes]


def _spread(row: dict[str, Any], name: str) -> str:
    spread = row[f"{name}_sd"]
    return f"{row[name]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")


FIGURES = {"gains": gains}
