"""A series and the stretches that its class rests on, as a picture."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Float64

from keyquery.estimators.importance import Importance
from keyquery.forms.checks import check_count

FOR, AGAINST = "#2a9d8f", "#b3446c"
MOST = 12  # dims that are drawn


def stretches(reading: Importance, pyplot: Any, series: int = 0) -> Any:
    """Above, the series, shaded where it speaks for or against the class; below, by how much."""
    check_count("series", series, least=0, most=len(reading.series) - 1)
    one = reading.series[series]
    values, relevance = np.array(one["values"], dtype=np.float64), np.array(one["relevance"])
    rows = min(values.shape[1], MOST)
    heights = [1.3 + 0.32 * (rows - 1), 0.8]
    size = (6.4, sum(heights) + 0.6)
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=size, sharex=True, layout="constrained", height_ratios=heights
    )
    _shade(above, relevance)
    _lines(above, values[:, :rows])
    at = np.arange(len(relevance))
    for colour, side in ((FOR, relevance.clip(min=0)), (AGAINST, relevance.clip(max=0))):
        below.fill_between(at, side, step="mid", color=colour, linewidth=0)
    below.axhline(0, color="#8c959f", linewidth=0.6)
    below.set(xlabel="time step", ylabel="nats")
    below.set_xlim(-0.5, len(relevance) - 0.5)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    said = f"predicted {one['predicted']} ({one['probability']:.0%})"
    above.set_title(said, loc="left", weight="bold")
    words = (("speaks for it", FOR), ("against", AGAINST))
    patch = import_module("matplotlib.patches").Patch
    keys = [patch(color=colour, alpha=0.6, label=word) for word, colour in words]
    above.legend(handles=keys, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, frameon=False, borderaxespad=0)
    below.set_title(f"log-odds of it lost without the {one['stretch']} steps around", loc="left", fontsize=7)
    return figure


def _lines(axis: Any, values: Float64[np.ndarray, "n dims"]) -> None:
    """One line on its own scale, or several above each other, each as tall as its row."""
    if values.shape[1] == 1:
        axis.plot(values[:, 0], color="#24292f", linewidth=1.1)
        axis.set_ylabel("value")
        return
    for dim, line in enumerate(values.T[::-1]):
        there = line[np.isfinite(line)]
        low, high = (there.min(), there.max()) if len(there) else (0.0, 0.0)
        axis.plot(dim + 0.85 * (line - low) / ((high - low) or 1.0), color="#24292f", linewidth=0.9)
    axis.set_yticks(np.arange(values.shape[1]) + 0.4, [f"dim {dim}" for dim in range(values.shape[1])][::-1])
    axis.tick_params(axis="y", length=0)


def _shade(axis: Any, relevance: Float64[np.ndarray, " n"]) -> None:
    most = np.abs(relevance).max() or 1.0
    for token, found in enumerate(relevance):
        colour = FOR if found > 0 else AGAINST
        axis.axvspan(token - 0.5, token + 0.5, color=colour, alpha=0.6 * abs(found) / most, linewidth=0)
