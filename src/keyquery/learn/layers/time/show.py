"""The kernel of a time encoding as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keyquery.learn.layers.time import TimeKernel
from keyquery.pages.colours import LIGHT, depth_colour

FAINT = "#8c959f"
LINE = LIGHT["symmetric"]  # ψ is symmetric
DASHED: dict[str, Any] = {"color": FAINT, "linewidth": 0.8, "linestyle": (0, (3, 3)), "zorder": 0}


def lags(reading: TimeKernel, pyplot: Any, periods: Sequence[float] = ()) -> Any:
    """Left, ψ, or what each head adds to its scores, over the lag; right, the share of every period.

    Known `periods`, such as a day, are drawn as dashed lines: on the left their multiples, on the right themselves.
    """
    if not all(period > 0 for period in periods):
        raise ValueError(f"periods must be above 0, got {list(periods)}")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(6.8, 2.3), layout="constrained", width_ratios=(2, 1))
    order = np.argsort(reading.lags)
    lag = np.array(reading.lags)[order]
    left.axhline(0, color=FAINT, linewidth=0.6)
    for head, row in enumerate(reading.heads or []):
        colour = depth_colour(head / max(len(reading.heads or []) - 1, 1))
        left.plot(lag, np.array(row)[order], color=colour, linewidth=1, label=f"head {head}")
    if reading.heads is None:
        left.plot(lag, np.array(reading.values)[order], color=LINE, linewidth=1.1)
        left.set(ylabel="ψ(lag)", title="time kernel", ylim=(min(-0.1, *reading.values) - 0.05, 1.05))
    else:
        left.set(ylabel="added to the score", title="time term of the scores")
        if len(reading.heads) <= 8:
            left.legend(frameon=False, fontsize=6.5, ncols=2)
    left.set(xlabel="inter-event time", xlim=(lag[0], lag[-1]))
    periodic = [row for row in reading.spectrum if row["frequency"] != 0]
    spectrum = [2 * math.pi / abs(row["frequency"]) for row in periodic]
    right.vlines(spectrum, 0, [row["share"] for row in periodic], color=LINE, linewidth=1, alpha=0.8)
    if max(spectrum, default=1) > 10 * min(spectrum, default=1):
        right.set_xscale("log")
        right.xaxis.set_major_formatter("{x:g}")
    right.set(xlabel="period", ylabel="share of ψ(0)", title="spectrum")
    right.set_ylim(bottom=0)
    for period in periods:
        for times in range(math.ceil(lag[0] / period), math.floor(lag[-1] / period) + 1):
            left.axvline(times * period, **DASHED)
        right.axvline(period, **DASHED)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


FIGURES = {"lags": lags}
