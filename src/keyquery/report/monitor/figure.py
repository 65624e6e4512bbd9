"""A monitored training as a figure: heads by steps, in the colour of a metric, with alarms marked."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.monitor.reading import Monitored
from keyquery.pages.colours import LIGHT
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional

SPREAD = ("largest", "bound", "sigma", "input_norm", "entry", "unscaled", "query_gradient", "key_gradient")  # log scale


def head_map(reading: Monitored, pyplot: Any, metric: str = "largest", title: str | None = None) -> Any:
    """Heads by steps in the colour of a metric, logarithmic where it has no upper end; alarms are crosses."""
    check_choice("metric", metric, tuple(reading.curves))
    values = np.array([[np.nan if v is None else v for v in curve] for curve in reading.curves[metric]])
    figure, axis = pyplot.subplots(figsize=(6.4, 1.4 + 0.06 * len(values)), layout="constrained")
    colours = optional("matplotlib.colors", "plot")
    ramp = colours.LinearSegmentedColormap.from_list("metric", ["#f2f4f6", LIGHT["skew"]])
    positive = values[values > 0]
    norm = colours.LogNorm() if metric in SPREAD and positive.size else None
    shown = np.where(values > 0, values, np.nan) if norm else values
    extent = (-0.5, len(reading.steps) - 0.5, len(values) - 0.5, -0.5)
    image = axis.imshow(shown, cmap=ramp, norm=norm, aspect="auto", extent=extent, interpolation="nearest")
    plain = optional("matplotlib.ticker", "plot").FormatStrFormatter("%g") if norm else None  # others write TeX
    figure.colorbar(image, label=f"{metric.replace('_', ' ')} ({reading.units[metric]})", format=plain)
    at = {step: record for record, step in enumerate(reading.steps)}
    marks = [(at[alarm["step"]], head) for alarm in reading.alarms for head in alarm["heads"] if alarm["step"] in at]
    if marks:
        axis.plot(*zip(*marks, strict=True), "x", color="#24292f", markersize=3)
    ticks = np.linspace(0, len(reading.steps) - 1, min(len(reading.steps), 6)).round().astype(int)
    axis.set_xticks(ticks, [str(reading.steps[tick]) for tick in ticks])
    axis.set(xlabel="step", ylabel="head, by layer", title=title or reading.model["name"])
    return figure
