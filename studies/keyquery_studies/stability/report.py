"""The study of stability as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.report.kit.tables import columns_table
from keyquery_studies.stability.study import StabilityStudy
from keyquery_studies.stability.trial import RECIPES


def tables(reading: StabilityStudy) -> list[Any]:
    """Outcomes, warnings and false alarms of every rule, rescues by QK-Clip, and kernels."""
    shown: list[Any] = [Text("trainings without QK-Clip", style="bold"), _outcomes(reading), ""]
    for recipe in (None, *RECIPES):
        title = f"warnings before the loss spikes, {'both recipes' if recipe is None else f'recipe {recipe!r}'}"
        shown += [Text(title, style="bold"), _rules(reading.rules(recipe)), ""]
    rescues = reading.rescues()
    if rescues:
        ended = [row["outcome"] for row in rescues]
        counts = ", ".join(f"{ended.count(kind)} {kind}" for kind in ("stable", "recovered", "diverged"))
        shown.append(f"QK-Clip on {len(rescues)} runs that diverged without: {counts}.")
    kernels = [row for row in reading.kernels() if row["trained"]]
    if kernels:
        shown += ["", Text("kernels, same recipe, rate and seed", style="bold"), _kernels(kernels)]
    if missing := reading.provenance.get("missing"):
        shown.append(f"{missing} trainings of the plan are not done yet: the same command resumes.")
    return shown


def _outcomes(reading: StabilityStudy) -> Table:
    table = columns_table("recipe", "QK-norm", "rate", "stable", "recovered", "diverged")
    rows = [row for row in reading.rows if row["tau"] is None and row["kernel"] == "general"]
    for cell in sorted({(row["recipe"], row["normed"], row["rate"]) for row in rows}):
        ended = [row["outcome"] for row in rows if (row["recipe"], row["normed"], row["rate"]) == cell]
        counts = (str(ended.count(kind)) for kind in ("stable", "recovered", "diverged"))
        table.add_row(cell[0], "yes" if cell[1] else "no", f"{cell[2]:g}", *counts)
    return table


def _rules(rows: list[dict[str, Any]]) -> Table:
    table = columns_table("rule", "median steps of warning", "warned of", "false alarms")
    for row in rows:
        ahead = "–" if row["median_warning"] is None else f"{row['median_warning']:.0f}"
        warned, false = f"{row['warned']} of {row['diverged']}", f"{row['false_alarms']} of {row['stable']}"
        table.add_row(row["rule"], ahead, warned, false)
    return table


def _kernels(rows: list[dict[str, Any]]) -> Table:
    table = columns_table("kernel", "diverged", "median step of the spike", "median final loss")
    for row in rows:
        spike = "–" if row["median_spike"] is None else f"{row['median_spike']:.0f}"
        final = "–" if row["median_final"] is None else f"{row['median_final']:.3f}"
        table.add_row(row["kernel"], f"{row['diverged']} of {row['trained']}", spike, final)
    return table
