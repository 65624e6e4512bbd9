"""The study of vision and language as a picture: what variants can do, what parts carry, and flow beside the loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.studies.vision_language import VisionLanguageStudy

TASKS = {
    "directed, exchanged": "left of, above:\nthings exchanged",
    "directed, replaced": "left of, above:\na thing replaced",
    "reciprocal, replaced": "and, beside:\na thing replaced",
}
PARTS = {"reciprocal": "#2166ac", "directional": "#d6701c", "popularity": "#8c959f"}
FIGURES = {"matching": "#24292f", "relations": "#d6701c", "texts_at_1": "#2166ac", "filled_both": "#2a9d8f"}
CALLED = {"matching": "matching", "relations": "relations", "texts_at_1": "R@1", "filled_both": "both things filled"}


def seen(reading: VisionLanguageStudy, pyplot: Any) -> Any:
    """Above, what variants can do; below, what parts of the scores carry, and flow against the rise of the loss."""
    rows = reading.summary()
    figure = pyplot.figure(figsize=(7.4, 6.0), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    _scores(above.subplots(), rows)
    left, middle, right = below.subplots(1, 3, width_ratios=[1.2, 1, 1])
    dataset = rows[0]["dataset"]
    _parts(left, reading, dataset)
    _points(middle, reading, dataset, "course", "over training")
    _points(right, reading, dataset, "layers", "layer by layer")
    middle.set(ylabel="rise of the text loss, nats")
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _scores(axis: Any, rows: list[dict[str, Any]]) -> None:
    labels = [f"{row['variant']}\n{row['dataset']}" for row in rows]
    for place, (name, colour) in enumerate(FIGURES.items()):
        at = np.arange(len(rows)) + 0.2 * (place - 1.5)
        spread = [row[f"{name}_sd"] or 0.0 for row in rows]
        axis.bar(at, [row[name] for row in rows], 0.18, yerr=spread, color=colour, label=CALLED[name], ecolor="#6e7781")
    axis.axhline(0.5, color="#24292f", linewidth=0.6, linestyle=":")
    axis.set_xticks(range(len(rows)), labels, fontsize=6.5)
    axis.set(ylim=(0, 1.02), ylabel="share right", title="pairs of things that were never said together")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False, fontsize=7)


def _parts(axis: Any, reading: VisionLanguageStudy, dataset: str) -> None:
    rows = [row for row in reading.turned() if row["dataset"] == dataset and row["variant"] == "parser"]
    for place, (part, colour) in enumerate(PARTS.items()):
        found = {row["task"]: row for row in rows if row["part"] == part}
        at = np.arange(len(found)) + 0.25 * (place - 1)
        spread = [row["change_sd"] or 0.0 for row in found.values()]
        axis.bar(at, [row["change"] for row in found.values()], 0.22, yerr=spread, color=colour, label=part)
    axis.axhline(0, color="#24292f", linewidth=0.6)
    axis.set_xticks(range(len(TASKS)), list(TASKS.values()), fontsize=5.5)
    axis.set(ylabel="matching loss without it, rise", title="parts of the scores")
    axis.legend(frameon=False, fontsize=6)


def _points(axis: Any, reading: VisionLanguageStudy, dataset: str, name: str, title: str) -> None:
    for row in reading.rows:
        if row["dataset"] == dataset:
            x = [float(np.mean(point["to_text"])) for point in row[name]]
            y = [point["rise"] for point in row[name]]
            line = "solid" if name == "course" else "none"
            axis.plot(x, y, linestyle=line, marker=".", markersize=4, linewidth=0.5, color="#2166ac", alpha=0.6)
    axis.axvline(0, color="#24292f", linewidth=0.6)
    axis.set(xlabel="flow into words above chance", title=title)
