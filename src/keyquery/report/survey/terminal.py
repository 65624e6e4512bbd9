"""A survey in the terminal: a table of models, and its conclusions in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.pages.tables import columns_table
from keyquery.support.printable import counted
from keyquery.survey.reading import Survey

MOST = 40  # models, runs or families that a terminal shows
SOME = 8  # runs or architectures that are described in words
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def conclusions(reading: Survey) -> list[str]:
    """The conclusions, one sentence each."""
    sentences = []
    for run in reading.runs[:SOME]:
        half = "" if run["half"] is None else f", half of the change by step {run['half']:,}"
        change = (
            f"symmetry goes from {run['start']:+z.3f} at step {run['first']:,} to {run['end']:+z.3f} at {run['last']:,}"
        )
        count = f"{run['steps']} checkpoints{_rises(run['rises'])}"
        sentences.append(f"During training, {run['run']}: {change}{half} ({count}).")
    if len(reading.runs) > SOME:
        grown = sum(run["change"] > 0 for run in reading.runs)
        sentences.append(f"During training, symmetry increases in {grown} of {len(reading.runs)} runs.")
    for row in reading.sizes[:SOME]:
        name = "all architectures" if row["family"] == "all" else row["family"]
        span = f"{counted(row['models'], 'model')}, {size(row['smallest'])} to {size(row['largest'])}"
        sentences.append(
            f"By size, {name}: symmetry changes by {row['slope']:+.3f} per decade ({span}{_rises(row['rises'])})."
        )
    if len(reading.families) > 1:
        first, last = reading.families[0], reading.families[-1]
        most, least = (
            f"{row['family']}, {row['attention']}: {row['symmetry']:+z.3f} ({counted(row['models'], 'model')})"
            for row in (first, last)
        )
        sentences.append(f"By architecture, symmetry is highest in {most}, lowest in {least}.")
    return sentences


def survey_lines(reading: Survey) -> list[Any]:
    """A row per model, the conclusions, and models that could not be read."""
    table = columns_table("model", "architecture", "step", "size", "heads", "symmetry", "of layers", "column dir.")
    for row in sorted(reading.models, key=_order)[:MOST]:
        table.add_row(
            _cut(row["name"], 36),
            _cut(str(row["family"]), 12),
            "–" if row["step"] is None else f"{row['step']:,}",
            size(row["parameters"]),
            str(row["heads"]),
            *(f"{row[name]:+z.3f}" for name in ("symmetry", "symmetry_together", "column_directionality")),
        )
    more = [f"… and {len(reading.models) - MOST} more"] if len(reading.models) > MOST else []
    broken = [f"Could not read {row['name']}: {row['why']}" for row in reading.broken]
    return [table, *more, "", *conclusions(reading), *broken]


def size(count: float) -> str:
    """A parameter count with a unit."""
    for unit, letter in UNITS:
        if count >= 0.9995 * unit:
            return f"{float(f'{count / unit:.3g}'):g}{letter}"
    return f"{count:g}"


def _order(row: Mapping[str, Any]) -> tuple[str, int, str]:
    """Sort key that keeps the checkpoints of a run together."""
    return str(row["run"] or row["name"]), row["step"] or 0, row["name"]


def _rises(value: float | None) -> str:
    return "" if value is None else f"; rank correlation {value:+z.2f}"


def _cut(text: str, most: int) -> str:
    """The end of a long name, which distinguishes models."""
    return text if len(text) <= most else "…" + text[1 - most :]
