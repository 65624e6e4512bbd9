"""A time series and the segments that its predicted class depends on, as a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64

from keyquery.learn.series.importance import Importance
from keyquery.pages.colours import AGAINST, FOR
from keyquery.support.checks import check_count
from keyquery.support.extras import optional
from keyquery.support.printable import printable

LINE = "#24292f"
MAX_DIMS = 12  # dimensions that are drawn
LETTERS = 24  # characters of a name that are shown


def stretches(reading: Importance, pyplot: Any, series: int = 0) -> Any:
    """Above, the series, shaded where it is evidence for or against the class; below, by how much."""
    check_count("series", series, least=0, most=len(reading.series) - 1)
    row = reading.series[series]
    values, relevance = np.array(row["values"], dtype=np.float64), np.array(row["relevance"])
    rows = min(values.shape[1], MAX_DIMS)
    heights = [1.3 + 0.32 * (rows - 1), 0.8]
    size = (6.4, sum(heights) + 0.8)
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=size, sharex=True, layout="constrained", height_ratios=heights
    )
    _shade(above, relevance)
    _lines(above, values[:, :rows], list(reading.columns or []))
    if rows < values.shape[1]:
        above.set_ylabel(f"first {rows} of {values.shape[1]} dimensions")
    edges = np.arange(len(relevance) + 1) - 0.5
    for colour, side in ((FOR, relevance.clip(min=0)), (AGAINST, relevance.clip(max=0))):
        below.stairs(side, edges, fill=True, color=colour, linewidth=0)
    below.axhline(0, color="#8c959f", linewidth=0.6)
    below.set(xlabel="time step", ylabel="nats", xlim=(edges[0], edges[-1]))
    ticker = optional("matplotlib.ticker", "plot")
    below.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    predicted = printable(str(row["predicted"]), LETTERS)
    above.set_title(f"predicted {predicted} ({row['probability']:.0%})", loc="left", weight="bold")
    around = f"the {row['stretch']} steps around" if row["stretch"] > 1 else "the step itself"
    below.set_title(f"drop in its log-odds without {around}", loc="left", fontsize=7)
    words = (("evidence for", FOR), ("evidence against", AGAINST))
    patch = optional("matplotlib.patches", "plot").Patch
    keys = [patch(color=colour, alpha=0.6, label=word) for word, colour in words]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _lines(axis: Any, values: Float64[np.ndarray, "n dims"], names: list[str]) -> None:
    """One line on its own scale, or several stacked, each scaled to its row."""
    if values.shape[1] == 1:
        _line(axis, values[:, 0])
        axis.set_ylabel(printable(names[0], LETTERS) if names else "value")
        return
    for row, line in enumerate(values.T[::-1]):
        finite = line[np.isfinite(line)]
        low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
        _line(axis, row + (0.85 * (line - low) / (high - low) if high > low else 0.4 + 0 * line))
    shown = [printable(name, LETTERS) for name in names] or [f"dim {dim}" for dim in range(values.shape[1])]
    axis.set_yticks(np.arange(values.shape[1]) + 0.4, shown[: values.shape[1]][::-1])
    axis.tick_params(axis="y", length=0)


def _line(axis: Any, values: Float64[np.ndarray, " n"]) -> None:
    """A line, with dots for single values between gaps."""
    axis.plot(values, color=LINE, linewidth=1.0)
    finite = np.pad(np.isfinite(values), 1)
    alone = np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])
    if len(alone):
        axis.plot(alone, values[alone], ".", color=LINE, markersize=4)


def _shade(axis: Any, relevance: Float64[np.ndarray, " n"]) -> None:
    most = np.abs(relevance).max() or 1.0
    for token, value in enumerate(relevance):
        colour = FOR if value > 0 else AGAINST
        axis.axvspan(token - 0.5, token + 0.5, color=colour, alpha=0.6 * abs(value) / most, linewidth=0)


FIGURES = {"stretches": stretches}
