"""The study of depth as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.report.depth.figure import short
from keyquery.report.kit.tables import columns_table
from keyquery_studies.depth.study import DepthStudy
from keyquery_studies.kernels.report import seeds_of


def tables(reading: DepthStudy) -> list[Any]:
    """Losses by depth and budget, the best depth beside the law's, and what heads are made of."""
    rows = reading.summary()
    if not rows:
        return ["No shape has been trained at all its learning rates yet."]
    title = f"loss on text not seen, nats a token, mean of {seeds_of(rows)} (width)"
    shown = [Text(title, style="bold"), _by_depth(rows, _loss), ""]
    shown += [_optimum(found) for found in reading.optima()]
    shown += _edges(rows)
    what = "heads on text: symmetric : skew : popularity, % of the scores' variance"
    shown += ["", Text(what, style="bold"), _by_depth(rows, _mix), ""]
    shown += [_trend(found) for found in reading.trends()]
    if reading.diverged:
        lost = (f"{row['layers']} of {short(row['budget'])} at {row['rate']:g}" for row in reading.diverged)
        shown.append(f"Diverged: {', '.join(lost)}.")
    if missing := reading.provenance.get("missing"):
        shown.append(f"{missing} trainings of the plan are not done yet: the same command goes on.")
    return shown


def _by_depth(rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> Table:
    budgets = sorted({row["budget"] for row in rows})
    made = columns_table("layers", *(short(budget) for budget in budgets))
    for layers in sorted({row["layers"] for row in rows}):
        at = {row["budget"]: cell(row) for row in rows if row["layers"] == layers}
        made.add_row(str(layers), *(at.get(budget, "–") for budget in budgets))
    return made


def _loss(row: dict[str, Any]) -> str:
    spread = "" if row["loss_sd"] is None else f" ± {row['loss_sd']:.3f}"
    return f"{row['loss']:.3f}{spread} ({row['width']})"


def _mix(row: dict[str, Any]) -> str:
    return " : ".join(f"{100 * row[name]:.0f}" for name in ("symmetric", "skew", "popularity"))


def _optimum(found: dict[str, Any]) -> str:
    said = f"{short(found['budget'])} parameters: best of those tried {found['best']} layers; "
    if found["layers"] is None:
        said += "a parabola has no lowest point among them"
    else:
        said += f"a parabola is lowest at {found['layers']:.1f} ({found['low']:.1f} to {found['high']:.1f})"
    return f"{said}; the law says {found['law']:.1f}."


def _edges(rows: list[dict[str, Any]]) -> list[str]:
    """At which learning rates others might be better still."""
    said = []
    for rate in sorted({row["rate"] for row in rows if row["edge"]}):
        at = [f"{row['layers']} of {short(row['budget'])}" for row in rows if row["edge"] and row["rate"] == rate]
        which = "every shape" if len(at) == len(rows) else ", ".join(at)
        said.append(f"At the edge of the learning rates tried, {rate:g}: {which}.")
    return said


def _trend(found: dict[str, Any]) -> str:
    said = []
    for name, called in (("pairwise_symmetric", "on text"), ("raw_symmetric", "of the weights")):
        slope = found[name]
        if slope is not None:
            said.append(f"{called} {slope['change']:+z.3f} ({slope['low']:+z.3f} to {slope['high']:+z.3f})")
    told = ", ".join(said) or "too few trainings to tell"
    what = "symmetric share of the pairwise parts, change for e times as many layers"
    return f"{short(found['budget'])} parameters: {what}: {told}."
