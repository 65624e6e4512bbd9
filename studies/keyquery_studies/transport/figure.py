"""Figure of the study `transport`: accuracy and time relative to a Transformer, and trajectories of points."""

from __future__ import annotations

import math
from typing import Any

from keyquery_studies.transport.study import TransportStudy

CALLED = {
    "ot": "transport, matched",
    "random": "transport, random pairs",
    "mean": "transport, class means",
    "simplex": "transport, simplex",
    "transformer": "Transformer",
    "published": "Transformer as released",
    "perceptron": "MLP",
    "logistic": "logistic regression",
    "boosting": "boosted trees",
}
COLOURS = {
    "ot": "#d6701c",
    "random": "#b03a8c",
    "mean": "#2166ac",
    "simplex": "#2a9d8f",
    "published": "#24292f",
    "perceptron": "#8250df",
    "logistic": "#8c959f",
    "boosting": "#1a7f37",
}
MARKS = {"ot": "o", "random": "s", "mean": "D", "simplex": "P", "published": "x", "perceptron": "v"}
NETWORKS = {
    ("published", "input"): "as released,\nfrom the input",
    ("published", "before"): "the same,\nuntrained",
    ("published", "untrained"): "as released,\nfrom init",
    ("transformer", "untrained"): "encoder,\nfrom init",
}
SHAPES = {
    "optimality": ("W₂/T", "#d6701c"),
    "by_lot": ("W₂/T, random matching", "#f1c49a"),
    "shape": ("W₂/T, class means removed", "#2166ac"),
    "shape_by_lot": ("the same, random matching", "#a8c8e8"),
    "efficiency": ("efficiency", "#6e7781"),
}
BEGUN = {"none": "none", "toward": "toward the data", "published": "not aligned", "away": "classes permuted"}


def carried(reading: TransportStudy, pyplot: Any) -> Any:
    """Top: accuracy and time relative to a Transformer, per dataset; bottom: trajectories, and pre-trained heads."""
    rows = [row for row in reading.summary() if row["method"] != "transformer" and row["gap"] is not None]
    if not rows or not reading.courses or not reading.begun:
        raise ValueError("the figure needs all parts of the study: accuracy, course and start")
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = pyplot.figure(figsize=(7.4, 2.2 + 0.21 * len(sets) + 2.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[2.0 + 0.21 * len(sets), 2.6])
    axes = above.subplots(1, 2, sharey=True)
    _dots(axes[0], rows, sets, "gap")
    _dots(axes[1], rows, sets, "times")
    axes[0].set(xlabel="accuracy minus the Transformer's")
    axes[1].set(xlabel="speed-up in CPU time over the Transformer", xscale="log")
    axes[1].xaxis.set_major_formatter("{x:g}")
    axes[0].set_yticks(range(len(sets)), sets)
    axes[0].invert_yaxis()
    above.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    left, right = below.subplots(1, 2, width_ratios=[1.5, 1])
    _bars(left, reading)
    _begun(right, reading)
    for axis in (*axes, left, right):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _dots(axis: Any, rows: list[dict[str, Any]], sets: list[str], name: str) -> None:
    axis.axvline(0 if name == "gap" else 1, color="#24292f", linewidth=0.8)
    methods = [method for method in COLOURS if any(row["method"] == method for row in rows)]
    for place, method in enumerate(methods):
        method_rows = [row for row in rows if row["method"] == method]
        at = [sets.index(row["dataset"]) + 0.7 * (place / max(len(methods) - 1, 1) - 0.5) for row in method_rows]
        look: dict[str, Any] = {"color": COLOURS[method], "markersize": 3, "linewidth": 0.7}
        spread = [row[f"{name}_sd"] or 0.0 for row in method_rows]
        mark = {"fmt": MARKS.get(method, "."), "label": CALLED[method]}
        axis.errorbar([row[name] for row in method_rows], at, xerr=spread if name == "gap" else None, **mark, **look)
    axis.grid(axis="y", linewidth=0.3, alpha=0.4)


def _bars(axis: Any, reading: TransportStudy) -> None:
    """Means over datasets and seeds, per network."""
    rows = reading.followed()
    kinds = [kind for kind in NETWORKS if any((row["network"], row["start"]) == kind for row in rows)]
    for place, (name, (label, colour)) in enumerate(SHAPES.items()):
        each = [[_figure(row, name) for row in rows if (row["network"], row["start"]) == kind] for kind in kinds]
        at = [number + 0.16 * (place - 2) for number in range(len(kinds))]
        axis.bar(at, [sum(values) / len(values) for values in each], width=0.14, color=colour, label=label)
        for where, values in zip(at, each, strict=True):
            axis.plot([where] * len(values), values, ".", color="#24292f", markersize=2)
    axis.set_xticks(range(len(kinds)), [NETWORKS[kind] for kind in kinds])
    axis.set(ylim=(0, 1.02), title="trajectories of a Transformer's points")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=6.5)


def _figure(row: dict[str, Any], name: str) -> float:
    """A metric; efficiency is undefined for a trajectory of two points."""
    return math.nan if name == "efficiency" and row["start"] == "before" else float(row[name])


def _begun(axis: Any, reading: TransportStudy) -> None:
    rows = reading.starts()
    names = [name for name in BEGUN if any(row["start"] == name for row in rows)]
    for number, dataset in enumerate(dict.fromkeys(row["dataset"] for row in rows)):
        by_start = {row["start"]: row for row in rows if row["dataset"] == dataset}
        at = [names.index(name) + 0.16 * (2 * number - 1) for name in by_start]
        values, spread = ([row[key] or 0.0 for row in by_start.values()] for key in ("reached", "reached_sd"))
        colour = ("#d6701c", "#2166ac")[number % 2]
        axis.errorbar(values, at, xerr=spread, fmt="o", color=colour, markersize=4, capsize=2, label=dataset)
    axis.set_yticks(range(len(names)), [BEGUN[name] for name in names])
    axis.invert_yaxis()
    axis.set(xlabel="epochs to convergence", title="pre-trained head", xlim=(0, None))
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, -0.24), frameon=False, fontsize=6.5)
