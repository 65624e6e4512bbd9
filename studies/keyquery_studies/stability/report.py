"""The study of stability as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.stability.figure import warnings
from keyquery_studies.stability.study import StabilityStudy


def lines(reading: StabilityStudy) -> list[Any]:
    """Outcomes, warnings and false alarms of every rule, rescues by QK-Clip, and kernels."""
    shown: list[Any] = [Text("trainings without QK-Clip", style="bold"), _outcomes(reading), ""]
    for against, runs in product(("stable", "healthy"), ("held out", "calibration")):
        rules = [
            rule for rule in reading.rules if (rule["against"], rule["runs"], rule["recipe"]) == (against, runs, "both")
        ]
        title = f"warnings before the loss spikes, {runs} seeds; false alarms in {against} runs"
        shown += [Text(title, style="bold"), _rules(rules), ""]
    if rescued := reading.rescued():
        shown += [Text("QK-Clip on runs that diverged without", style="bold"), _rescued(rescued), ""]
    if kernels := reading.kernels():
        shown += [Text("kernels, same recipe, rate and seed", style="bold"), _kernels(kernels)]
    if missing := reading.provenance.get("missing"):
        shown.append(f"{missing} trainings of the plan are not done yet: the same command resumes.")
    return shown


def _outcomes(reading: StabilityStudy) -> Table:
    table = columns_table("recipe", "kernel", "rate", "stable", "recovered", "diverged")
    rows = [row for row in reading.rows if row["tau"] is None]
    cells = [(row["recipe"], _arm(row), row["rate"]) for row in rows]
    for cell in sorted(set(cells)):
        ended = [row["outcome"] for row, of in zip(rows, cells, strict=True) if of == cell]
        counts = (str(ended.count(kind)) for kind in ("stable", "recovered", "diverged"))
        table.add_row(cell[0], cell[1], f"{cell[2]:g}", *counts)
    return table


def _arm(row: Mapping[str, Any]) -> str:
    return f"{row['kernel']}{', QK-norm' if row['normed'] else ''}, {row['depth']} layers"


def _rules(rows: list[Mapping[str, Any]]) -> Table:
    table = columns_table("rule", "thresholds", "median steps of warning", "warned of", "false alarms")
    for row in rows:
        ahead = "–" if row["median_warning"] is None else f"{row['median_warning']:.0f}"
        warned, false = f"{row['warned']} of {row['diverged']}", f"{row['false_alarms']} of {row['stable']}"
        table.add_row(row["rule"], "fit" if row["fitted"] else "usual", ahead, warned, false)
    return table


def _rescued(rows: list[dict[str, Any]]) -> Table:
    table = columns_table("recipe", "rate", "stable", "recovered", "diverged", "loss of rescued", "lowest without")
    for row in rows:
        counts = (f"{row[kind]} of {row['diverged_without']}" for kind in ("stable", "recovered", "diverged"))
        losses = _loss(row["final_of_rescued"]), _loss(row["their_lowest_without"])
        table.add_row(row["recipe"], f"{row['rate']:g}", *counts, *losses)
    return table


def _kernels(rows: list[dict[str, Any]]) -> Table:
    table = columns_table("recipe", "kernel", "diverged", "median step of the spike", "later", "sooner", "final loss")
    for row in rows:
        spike = "–" if row["median_spike"] is None else f"{row['median_spike']:.0f}"
        compared = (str(row["later_than_general"]), str(row["sooner_than_general"]))
        diverged = f"{row['diverged']} of {row['trained']}"
        table.add_row(row["recipe"], row["kernel"], diverged, spike, *compared, _loss(row["median_final"]))
    return table


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


FIGURES = {"warnings": warnings}
