"""Figure of the study `depth`: loss against depth, best depth compared with the law, score parts of the heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keyquery.learn.depth.law import Law
from keyquery.learn.depth.show import short
from keyquery.pages.colours import depth_colour
from keyquery_studies.depth.study import DepthStudy

LAW, GREY = "#24292f", "#8c959f"


def depths(reading: DepthStudy, pyplot: Any) -> Any:
    """Loss minus the best of its parameter count; fitted optimum and the law; symmetric share of the heads.

    Optima are shown only if no shape was best at the edge of its learning rates.
    """
    rows = reading.summary()
    if not rows:
        raise ValueError("nothing to draw: no shape has been trained at all its learning rates yet")
    budgets = sorted({row["budget"] for row in rows})
    colours = {budget: depth_colour(place / max(len(budgets) - 1, 1)) for place, budget in enumerate(budgets)}
    known = not any(row["edge"] for row in rows)
    optima = reading.optima() if known else [{**optimum, "fit": None} for optimum in reading.optima()]
    count = 3 if known else 2
    figure, axes = pyplot.subplots(1, count, figsize=(8.4, 2.9), layout="constrained")
    _losses(axes[0], rows, optima, colours)
    if known:
        _optima(axes[1], optima, colours)
    _mixes(axes[-1], rows, colours)
    every = sorted({row["layers"] for row in rows})
    for axis in (axes[0], axes[-1]):
        axis.set(xscale="log", xlabel="layers")
        axis.set_xticks(every, [str(layers) for layers in every])
        axis.minorticks_off()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(budgets), frameon=False)
    return figure


def _losses(axis: Any, rows: Sequence[dict[str, Any]], optima: Sequence[dict[str, Any]], colours: Any) -> None:
    for optimum in optima:
        budget, colour = optimum["budget"], colours[optimum["budget"]]
        at = [row for row in rows if row["budget"] == budget]
        best = min(row["loss"] for row in at)
        x, y = [row["layers"] for row in at], [row["loss"] - best for row in at]
        spread = [row["loss_sd"] or 0.0 for row in at]
        label = f"{short(budget)} parameters (best loss {best:.3f})"
        axis.errorbar(x, y, spread, fmt="o", color=colour, markersize=3.5, capsize=2, label=label)
        if optimum["fit"] is not None:
            low, high = map(math.log, optimum["near"])
            logs = [low + (high - low) * i / 60 for i in range(61)]
            axis.plot(
                [math.exp(u) for u in logs],
                [sum(c * u**power for power, c in enumerate(optimum["fit"])) - best for u in logs],
                color=colour,
                linewidth=1.2,
            )
    axis.set(title="loss minus the best of each size", ylabel="nats per token")


def _optima(axis: Any, optima: Sequence[dict[str, Any]], colours: Any) -> None:
    ends = min(optimum["budget"] for optimum in optima) / 2, max(optimum["budget"] for optimum in optima) * 2
    budgets = [ends[0] * (ends[1] / ends[0]) ** (i / 60) for i in range(61)]
    axis.plot(budgets, [Law().layers(params) for params in budgets], color=LAW, linewidth=1.2, linestyle="--")
    axis.text(0.97, 0.04, "dashed: the law, extrapolated", color=LAW, ha="right", transform=axis.transAxes)
    for optimum in optima:
        colour = colours[optimum["budget"]]
        axis.plot(optimum["budget"], optimum["best"], "o", color=colour, markerfacecolor="none", markersize=7)
        if optimum["layers"] is not None:
            ends = optimum["layers"] - optimum["low"], optimum["high"] - optimum["layers"]
            axis.errorbar(
                optimum["budget"], optimum["layers"], [[end] for end in ends], fmt="o", color=colour, capsize=2, ms=4
            )
    axis.set(
        xscale="log", yscale="log", title="best depth (hollow: best trained)", xlabel="parameters", ylabel="layers"
    )
    axis.set_ylim(0.5, 40)
    axis.set_xticks(
        [optimum["budget"] for optimum in optima], [f"{optimum['budget'] / 1e6:.2g}M" for optimum in optima]
    )
    axis.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axis.minorticks_off()


def _mixes(axis: Any, rows: Sequence[dict[str, Any]], colours: Any) -> None:
    for budget, colour in colours.items():
        at = [row for row in rows if row["budget"] == budget]
        spread = [row["pairwise_symmetric_sd"] or 0.0 for row in at]
        x = [row["layers"] for row in at]
        y = [row["pairwise_symmetric"] for row in at]
        axis.errorbar(x, y, spread, fmt="o-", color=colour, markersize=3.5, linewidth=1)
    axis.axhline(0.5, color=GREY, linewidth=0.6, linestyle=":")
    axis.set(title="symmetric share of the heads", ylim=(0, 1), ylabel="symmetric/(symmetric + skew), on text")
