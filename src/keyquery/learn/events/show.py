"""Which past events change the next event, and at which lag, as a figure."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.learn.events.interactions import Interactions
from keyquery.pages.colours import AGAINST, FOR
from keyquery.support.checks import check_count
from keyquery.support.extras import optional

TYPES = 24  # event types that are drawn, those with the largest changes
COLUMNS = 2
# Units for lags, in seconds.
SPANS = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0, "years": 365.25 * 86400}
NOW = {"past": "the last event", "target_time": "the event"}


def interactions(reading: Interactions, pyplot: Any, pairs: int = 6) -> Any:
    """Left, past by next event types: the change at the lag where it is strongest; right, curves of some pairs."""
    check_count("pairs", pairs, least=1)
    strongest = reading.strongest(pairs)
    change, error = np.array(reading.change), np.array(reading.error)
    sure = np.abs(change) - 2 * error
    best = np.take_along_axis(change, sure.argmax(-1)[..., None], -1)[..., 0]
    weight = np.maximum(sure.max((0, 2)), sure.max((1, 2)))
    kept = np.sort(np.argsort(-weight, kind="stable")[:TYPES])
    side, rows = 1.5 + 0.19 * len(kept), -(-len(strongest) // COLUMNS)
    left, height = max(side, 2.6), max(side, 0.5 + 1.15 * rows, 2.4)
    figure = pyplot.figure(figsize=(left + 4.2, height), layout="constrained")
    map_figure, curves = figure.subfigures(1, 2, width_ratios=[left, 4.2])
    _map(map_figure, reading, best[np.ix_(kept, kept)], [str(reading.types[i]) for i in kept])
    axes = curves.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    unit, size = _unit(reading)
    for axis, row in zip(axes, strongest, strict=False):
        pair = reading.types.index(row["past"]), reading.types.index(row["next"])
        _curve(axis, np.array(reading.lags) / size, change[pair], error[pair])
        axis.set_title(f"{row['past']} → {row['next']}", fontsize=7, loc="left")
    for axis in axes[len(strongest) :]:
        axis.set_visible(False)
    curves.supxlabel(f"time before {NOW[reading.information]} ({unit})", fontsize=8)
    curves.supylabel("change of log-probability (nats)", fontsize=8)
    return figure


def _map(figure: Any, reading: Interactions, best: np.ndarray, names: list[str]) -> None:
    axis = figure.subplots()
    colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("odds", [AGAINST, "#f2f4f6", FOR])
    most = float(np.abs(best).max()) or 1.0
    image = axis.imshow(best, vmin=-most, vmax=most, cmap=colours)
    small = {"fontsize": 8 if len(names) < 12 else 6}
    axis.set_xticks(range(len(names)), names, rotation=90, **small)
    axis.set_yticks(range(len(names)), names, **small)
    axis.set(xlabel="next event", ylabel="additional past event")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    left_out = "" if len(names) == len(reading.types) else f" ({len(names)} of {len(reading.types)} types)"
    axis.set_title(f"probability ratio of the next event,\nat the lag of the strongest effect{left_out}", fontsize=8)
    bar = figure.colorbar(image, ax=axis, location="bottom", shrink=0.8, ticks=[-most, 0, most])
    bar.ax.set_xticklabels([f"× {np.exp(-most):.2g}", "× 1", f"× {np.exp(most):.2g}"])
    bar.outline.set_visible(False)


def _curve(axis: Any, lags: np.ndarray, change: np.ndarray, error: np.ndarray) -> None:
    colour = FOR if change[np.abs(change).argmax()] > 0 else AGAINST
    axis.axhline(0, color="#8c959f", linewidth=0.6)
    axis.fill_between(lags, change - 2 * error, change + 2 * error, color=colour, alpha=0.2, linewidth=0)
    axis.plot(lags, change, color=colour, linewidth=1.3)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)


def _unit(reading: Interactions) -> tuple[str, float]:
    """The name of the unit of lags, and its size in units of the reading."""
    if reading.clock == "numbers":
        return "units of times", 1.0
    middle = float(np.sqrt(reading.lags[0] * reading.lags[-1]))
    name = [name for name, size in SPANS.items() if size <= middle] or ["s"]
    return name[-1], SPANS[name[-1]]


FIGURES = {"interactions": interactions}
