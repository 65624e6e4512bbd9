"""Figure of the study `vision-language`: accuracy, effect of ablating score parts, and flow against the loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery_studies.vision_language.study import FEWEST, FLOWS, VisionLanguageStudy

TASKS = {"directed, exchanged": "directed", "reciprocal, replaced": "symmetric"}
PARTS = {"symmetric": "#2166ac", "skew": "#d6701c", "popularity": "#8c959f"}
FIGURES = {"matching": "#24292f", "relations": "#d6701c", "texts_at_1": "#2166ac", "filled_both": "#2a9d8f"}
CALLED = {"matching": "matching", "relations": "relations", "texts_at_1": "R@1", "filled_both": "both masked words"}
READ = {"raw": "cross-modal", "weighted": "weighted", "rollout": "rollout", "to_text": "into text"}
SHADES = ("#2a9d8f", "#24292f", "#c2408c")  # of datasets


def seen(reading: VisionLanguageStudy, pyplot: Any) -> Any:
    """Top: accuracy per variant; bottom: effect of ablating score parts, and correlation of flow with the loss."""
    rows = reading.summary()
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = pyplot.figure(figsize=(7.4, 6.0), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.1, 1])
    axes = np.atleast_1d(above.subplots(1, len(datasets), sharey=True))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    for axis, dataset in zip(axes, datasets, strict=True):
        _scores(axis, [row for row in rows if row["dataset"] == dataset], variants)
        axis.set_title(dataset)
    above.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    left, *others = below.subplots(1, 3, width_ratios=[1.25, 1, 1])
    _parts(left, reading, datasets)
    for axis, over, title in zip(others, ("training", "layers"), ("over training", "over layers"), strict=True):
        _correlations(axis, reading, over, datasets)
        axis.set_title(title)
    others[1].tick_params(labelleft=False)
    below.legend(*others[0].get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False, fontsize=7)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _scores(axis: Any, rows: list[dict[str, Any]], variants: list[str]) -> None:
    for place, (name, colour) in enumerate(FIGURES.items()):
        at = [variants.index(row["variant"]) + 0.15 * (place - 1.5) for row in rows]
        spread = [row[f"{name}_sd"] or 0.0 for row in rows]
        _dots(axis, [row[name] for row in rows], at, spread, colour, CALLED[name])
    axis.axvline(0.5, color="#24292f", linewidth=0.6, linestyle=":")
    axis.set_yticks(range(len(variants)), variants)
    axis.set(xlim=(0, 1.05), ylim=(len(variants) - 0.5, -0.5), xlabel="accuracy on unseen pairs")


def _dots(axis: Any, x: Any, y: Any, spread: Any, colour: str, label: str | None = None) -> None:
    axis.errorbar(x, y, xerr=spread, fmt="o", markersize=3, color=colour, elinewidth=0.8, label=label)


def _parts(axis: Any, reading: VisionLanguageStudy, datasets: list[str]) -> None:
    """Effect of ablating each part, of the variant "parser" if it was trained."""
    rows = reading.turned()
    known = "parser" if any(row["variant"] == "parser" for row in rows) else rows[0]["variant"]
    places = [(dataset, task) for dataset in datasets for task in TASKS]
    for number, (part, colour) in enumerate(PARTS.items()):
        by_task = {
            (row["dataset"], row["task"]): row for row in rows if row["part"] == part and row["variant"] == known
        }
        shown = [by_task[place] for place in places if place in by_task]
        at = [place + 0.18 * (number - 1) for place, which in enumerate(places) if which in by_task]
        _dots(axis, [row["change"] for row in shown], at, [row["change_sd"] or 0.0 for row in shown], colour, part)
    axis.axvline(0, color="#24292f", linewidth=0.6)
    axis.set_yticks(range(len(places)), [f"{dataset},\n{TASKS[task]}" for dataset, task in places], fontsize=6.5)
    axis.set(ylim=(len(places) - 0.5, -0.5), xlabel="Δ matching loss, nats", title=f"{known}, one part ablated")
    axis.legend(frameon=False, fontsize=6, loc="lower right")


def _correlations(axis: Any, reading: VisionLanguageStudy, over: str, datasets: list[str]) -> None:
    rows = [row for row in reading.correlations() if row["over"] == over]
    for number, dataset in enumerate(datasets):
        dataset_rows = [row for row in rows if row["dataset"] == dataset]
        x = [row["correlation"] for row in dataset_rows]
        at = [FLOWS.index(row["reading"]) + 0.2 * (number - 1) for row in dataset_rows]
        interval = [
            [row["correlation"] - row["low"] for row in dataset_rows],
            [row["high"] - row["correlation"] for row in dataset_rows],
        ]
        if dataset_rows:
            _dots(axis, x, at, interval, SHADES[number], dataset)
    if not rows:
        axis.text(0, 1.5, f"fewer than {FEWEST} runs", ha="center", fontsize=7)
    axis.axvline(0, color="#24292f", linewidth=0.6)
    axis.set_yticks(range(len(FLOWS)), [READ[name] for name in FLOWS])
    axis.set(xlim=(-1, 1), ylim=(len(FLOWS) - 0.5, -0.5), xlabel="Spearman ρ of flow and loss")
