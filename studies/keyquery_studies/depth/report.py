"""The study of depth as terminal tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.learn.depth.show import short
from keyquery.pages.tables import columns_table
from keyquery_studies.depth.figure import depths
from keyquery_studies.depth.study import DepthStudy
from keyquery_studies.kernels.report import seeds_of


def lines(reading: DepthStudy) -> list[Any]:
    """Loss by depth and parameter count, the best depth compared with the law, and score parts of the heads."""
    rows = reading.summary()
    if not rows:
        return ["No shape has been trained at all its learning rates yet."]
    title = f"loss on held-out text, nats per token, mean of {seeds_of(rows)} (width)"
    shown = [Text(title, style="bold"), _by_depth(rows, _loss), ""]
    shown += [_optimum(optimum) for optimum in reading.optima()]
    shown += _edges(rows)
    what = "heads on text: symmetric : skew : popularity, % of the scores' variance"
    shown += ["", Text(what, style="bold"), _by_depth(rows, _mix), ""]
    shown += [_trend(optimum) for optimum in reading.trends()]
    if reading.diverged:
        lost = (f"{row['layers']} of {short(row['budget'])} at {row['rate']:g}" for row in reading.diverged)
        shown.append(f"Diverged: {', '.join(lost)}.")
    if missing := reading.provenance.get("missing"):
        shown.append(f"{missing} trainings of the plan are not done yet: the same command resumes.")
    return shown


def _by_depth(rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> Table:
    budgets = sorted({row["budget"] for row in rows})
    table = columns_table("layers", *(short(budget) for budget in budgets))
    for layers in sorted({row["layers"] for row in rows}):
        at = {row["budget"]: cell(row) for row in rows if row["layers"] == layers}
        table.add_row(str(layers), *(at.get(budget, "–") for budget in budgets))
    return table


def _loss(row: dict[str, Any]) -> str:
    spread = "" if row["loss_sd"] is None else f" ± {row['loss_sd']:.3f}"
    return f"{row['loss']:.3f}{spread} ({row['width']})"


def _mix(row: dict[str, Any]) -> str:
    return " : ".join(f"{100 * row[name]:.0f}" for name in ("symmetric", "skew", "popularity"))


def _optimum(optimum: dict[str, Any]) -> str:
    line = f"{short(optimum['budget'])} parameters: best of those tried {optimum['best']} layers; "
    if optimum["layers"] is None:
        line += "the parabola has no minimum among them"
    else:
        line += f"the parabola's minimum is at {optimum['layers']:.1f} ({optimum['low']:.1f} to {optimum['high']:.1f})"
    return f"{line}; the law predicts {optimum['law']:.1f}."


def _edges(rows: list[dict[str, Any]]) -> list[str]:
    """At which learning rates others might be better still."""
    lines = []
    for rate in sorted({row["rate"] for row in rows if row["edge"]}):
        at = [f"{row['layers']} of {short(row['budget'])}" for row in rows if row["edge"] and row["rate"] == rate]
        which = "every shape" if len(at) == len(rows) else ", ".join(at)
        lines.append(f"At the edge of the learning rates tried, {rate:g}: {which}.")
    return lines


def _trend(trend: dict[str, Any]) -> str:
    slopes = []
    for name, called in (("pairwise_symmetric", "on text"), ("raw_symmetric", "of the weights")):
        slope = trend[name]
        if slope is not None:
            slopes.append(f"{called} {slope['change']:+z.3f} ({slope['low']:+z.3f} to {slope['high']:+z.3f})")
    text = ", ".join(slopes) or "too few trainings for a slope"
    what = "symmetric share of the pairwise parts, change for e times as many layers"
    return f"{short(trend['budget'])} parameters: {what}: {text}."


FIGURES = {"depths": depths}
