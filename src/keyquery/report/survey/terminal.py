"""A survey in words: what its answers are, and what they rest on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.report.kit.tables import columns_table
from keyquery.survey.reading import Survey

MOST = 40  # models, runs or families that a terminal shows
SOME = 8  # runs, or families, that are told in words
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def told(reading: Survey) -> list[str]:
    """The answers, each in one sentence.

    >>> told(Survey(models=[], sizes=[{"family": "gpt2", "models": 4, "smallest": 1e8, "largest": 1.5e9,
    ...     "slope": 0.05, "rises": 0.8}]))
    ['Over size, gpt2: symmetry changes by +0.050 a tenfold (4 models, 100M to 1.5B; rank correlation +0.80).']
    """
    said = []
    for run in reading.runs[:SOME]:
        half = "" if run["half"] is None else f", half of it by step {run['half']:,}"
        way = (
            f"symmetry goes from {run['start']:+z.3f} at step {run['first']:,} to {run['end']:+z.3f} at {run['last']:,}"
        )
        said.append(f"Over training, {run['run']}: {way}{half} ({run['steps']} steps{_rises(run['rises'])}).")
    if len(reading.runs) > SOME:
        grown = sum(run["change"] > 0 for run in reading.runs)
        said.append(f"Over training, {len(reading.runs)} runs: symmetry ends higher than it began in {grown} of them.")
    for row in reading.sizes[:SOME]:
        called = "all families" if row["family"] == "all" else row["family"]
        span = f"{counted(row['models'], 'model')}, {size(row['smallest'])} to {size(row['largest'])}"
        said.append(
            f"Over size, {called}: symmetry changes by {row['slope']:+.3f} a tenfold ({span}{_rises(row['rises'])})."
        )
    if len(reading.families) > 1:
        first, last = reading.families[0], reading.families[-1]
        most, least = (
            f"{row['family']}, {row['attention']}: {row['symmetry']:+z.3f} ({counted(row['models'], 'model')})"
            for row in (first, last)
        )
        said.append(f"Over families, symmetry is highest in {most}, lowest in {least}.")
    return said


def survey_lines(reading: Survey) -> list[Any]:
    """A row a model, the answers, and what could not be read."""
    made = columns_table("model", "family", "step", "size", "heads", "symmetry", "together", "direction")
    for row in sorted(reading.models, key=_order)[:MOST]:
        made.add_row(
            _cut(row["name"], 36),
            _cut(str(row["family"]), 12),
            "–" if row["step"] is None else f"{row['step']:,}",
            size(row["parameters"]),
            str(row["heads"]),
            *(f"{row[name]:+z.3f}" for name in ("symmetry", "symmetry_together", "column_directionality")),
        )
    more = [f"… and {len(reading.models) - MOST} more"] if len(reading.models) > MOST else []
    broken = [f"Not read: {row['name']}: {row['why']}" for row in reading.broken]
    return [made, *more, "", *told(reading), *broken]


def size(count: float) -> str:
    """A number of parameters as people say it.

    >>> [size(count) for count in (8.03e9, 124_439_808, 950)]
    ['8.03B', '124M', '950']
    """
    for unit, letter in UNITS:
        if count >= 0.9995 * unit:
            return f"{float(f'{count / unit:.3g}'):g}{letter}"
    return f"{count:g}"


def counted(count: int, what: str, many: str | None = None) -> str:
    """So many of something.

    >>> counted(1, "family", "families"), counted(2000, "model")
    ('1 family', '2,000 models')
    """
    return f"{count:,} {what if count == 1 else many or what + 's'}"


def _order(row: Mapping[str, Any]) -> tuple[str, int, str]:
    """Steps of a run one after the other."""
    return str(row["run"] or row["name"]), row["step"] or 0, row["name"]


def _rises(value: float | None) -> str:
    return "" if value is None else f"; rank correlation {value:+z.2f}"


def _cut(text: str, most: int) -> str:
    """Of a long name its end, which tells models apart."""
    return text if len(text) <= most else "…" + text[1 - most :]
