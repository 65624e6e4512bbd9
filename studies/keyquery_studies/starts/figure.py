"""Figure of the study `starts`: validation loss by step, and what each factor changes."""

from __future__ import annotations

from typing import Any

from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.starts.model import STARTS
from keyquery_studies.starts.study import Starts

COLOURS = dict(zip(STARTS, ("#59636e", "#bf3989", "#8250df", "#bc4c00", "#1a7f37"), strict=True))


def curves(reading: Starts, pyplot: Any) -> Any:
    """A panel per objective: every start at its best rate, a line per seed; below, the factors with their intervals."""
    objectives = [name for name in OBJECTIVES if any(row["objective"] == name for row in reading.models)]
    if not objectives:
        raise ValueError("this reading holds no finished training")
    figure, axes = pyplot.subplots(2, len(objectives), figsize=(4.2 * len(objectives), 5), layout="constrained")
    for (top, below), objective in zip(axes.reshape(2, -1).T, objectives, strict=True):
        steps = reading.budgets(objective)[-1]
        for start, colour in COLOURS.items():
            for number, row in enumerate(reading.best(objective, start, steps)):
                label = start if number == 0 else None
                top.plot(*zip(*row["curve"], strict=True), color=colour, linewidth=0.8, label=label)
        top.set(title=objective, xlabel="step", ylabel="validation loss, nats")
        top.legend(frameon=False, fontsize=6)
        rows = [row for row in reading.summary() if (row["objective"], row["steps"]) == (objective, steps)]
        for place, row in enumerate(reversed(rows)):
            if row["low"] is not None:
                below.plot([row["low"], row["high"]], [place, place], color="#59636e", linewidth=1)
            below.plot([row["change"]], [place], "o", color="#59636e", markersize=3)
        below.axvline(0, color="#d0d7de", linewidth=0.8, zorder=0)
        below.set_yticks(range(len(rows)), [row["factor"] for row in reversed(rows)], fontsize=7)
        below.set(xlabel="change of test loss, nats")
        below.locator_params(axis="x", nbins=4)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure
