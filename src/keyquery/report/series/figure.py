"""A series and the stretches that its class rests on, as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64

from keyquery.estimators.series.importance import Importance
from keyquery.support.checks import check_count
from keyquery.support.extras import optional

FOR, AGAINST, LINE = "#2a9d8f", "#b3446c", "#24292f"
MOST = 12  # dims that are drawn
LETTERS = 24  # of a name that are shown


def stretches(reading: Importance, pyplot: Any, series: int = 0) -> Any:
    """Above, the series, shaded where it speaks for or against the class; below, by how much."""
    check_count("series", series, least=0, most=len(reading.series) - 1)
    one = reading.series[series]
    values, relevance = np.array(one["values"], dtype=np.float64), np.array(one["relevance"])
    rows = min(values.shape[1], MOST)
    heights = [1.3 + 0.32 * (rows - 1), 0.8]
    size = (6.4, sum(heights) + 0.8)
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=size, sharex=True, layout="constrained", height_ratios=heights
    )
    _shade(above, relevance)
    _lines(above, values[:, :rows], list(reading.columns or []))
    if rows < values.shape[1]:
        above.set_ylabel(f"the first {rows} of {values.shape[1]} dims")
    edges = np.arange(len(relevance) + 1) - 0.5
    for colour, side in ((FOR, relevance.clip(min=0)), (AGAINST, relevance.clip(max=0))):
        below.stairs(side, edges, fill=True, color=colour, linewidth=0)
    below.axhline(0, color="#8c959f", linewidth=0.6)
    below.set(xlabel="time step", ylabel="nats", xlim=(edges[0], edges[-1]))
    ticker = optional("matplotlib.ticker", "plot")
    below.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    above.set_title(f"predicted {_cut(one['predicted'])} ({one['probability']:.0%})", loc="left", weight="bold")
    around = f"the {one['stretch']} steps around" if one["stretch"] > 1 else "the step itself"
    below.set_title(f"log-odds of it lost without {around}", loc="left", fontsize=7)
    words = (("speaks for it", FOR), ("against", AGAINST))
    patch = optional("matplotlib.patches", "plot").Patch
    keys = [patch(color=colour, alpha=0.6, label=word) for word, colour in words]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _lines(axis: Any, values: Float64[np.ndarray, "n dims"], names: list[str]) -> None:
    """One line on its own scale, or several above each other, each as tall as its row."""
    if values.shape[1] == 1:
        _line(axis, values[:, 0])
        axis.set_ylabel(_cut(names[0]) if names else "value")
        return
    for row, line in enumerate(values.T[::-1]):
        there = line[np.isfinite(line)]
        low, high = (there.min(), there.max()) if len(there) else (0.0, 0.0)
        _line(axis, row + (0.85 * (line - low) / (high - low) if high > low else 0.4 + 0 * line))
    shown = [_cut(name) for name in names] or [f"dim {dim}" for dim in range(values.shape[1])]
    axis.set_yticks(np.arange(values.shape[1]) + 0.4, shown[: values.shape[1]][::-1])
    axis.tick_params(axis="y", length=0)


def _line(axis: Any, values: Float64[np.ndarray, " n"]) -> None:
    """A line, and dots where a value stands alone between gaps."""
    axis.plot(values, color=LINE, linewidth=1.0)
    there = np.pad(np.isfinite(values), 1)
    alone = np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])
    if len(alone):
        axis.plot(alone, values[alone], ".", color=LINE, markersize=4)


def _cut(name: Any) -> str:
    said = str(name)
    return said if len(said) <= LETTERS else said[: LETTERS - 1] + "…"


def _shade(axis: Any, relevance: Float64[np.ndarray, " n"]) -> None:
    most = np.abs(relevance).max() or 1.0
    for token, found in enumerate(relevance):
        colour = FOR if found > 0 else AGAINST
        axis.axvspan(token - 0.5, token + 0.5, color=colour, alpha=0.6 * abs(found) / most, linewidth=0)
