"""A monitored training in the terminal, as a figure and as a page."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from keyquery.instruments.monitor.reading import Monitored
from keyquery.pages.colours import LIGHT
from keyquery.pages.components import measure, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import Text, columns_table
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.printable import counted

DIGITS = 4  # of numbers in a page
LISTED = 8  # heads and alarms shown
SHOWN = {
    "largest": "largest logit",
    "bound": "bound",
    "sigma": "σ₁(M)",
    "relative_entropy": "entropy/uniform",
    "sink": "sink",
    "query_gradient": "‖∂Wq‖",
}


def lines(reading: Monitored) -> list[Any]:
    """The heads with the largest logits at the last step, and the latest alarms."""
    shown = [name for name in SHOWN if name in reading.curves]
    table = columns_table("head", *(SHOWN[name] for name in shown))
    start = _shared_start(reading)
    logits = [float("inf") if curve[-1] is None else curve[-1] for curve in reading.curves["largest"]]
    for row in sorted(range(len(logits)), key=lambda row: -logits[row])[:LISTED]:
        cells = (reading.curves[name][row][-1] for name in shown)
        name = reading.heads[row]["name"][len(start) :]
        table.add_row(name, *("–" if cell is None else f"{cell:.3g}" for cell in cells))
    for column in table.columns:
        column.no_wrap = True
    count = f"{len(reading.heads)} heads, {len(reading.steps)} records"
    title = Text(f"{reading.model['name']}: step {reading.steps[-1]}, {count}", style="bold")
    alarms = [f"step {alarm['step']}: {alarm['reason']}" for alarm in reading.alarms[-LISTED:]] or ["No alarms."]
    return [title, *([f"Heads of {start}…"] if start else []), table, "", *alarms, *_clips(reading)]


def _shared_start(reading: Monitored) -> str:
    """What the dotted names of heads start with, up to a dot, if it is the same in all."""
    names = [head["name"].rpartition(".")[0] + "." for head in reading.heads]
    common = os.path.commonprefix(names)  # noqa: RUF071 (no paths)
    return common[: common.rfind(".") + 1]


def _clips(reading: Monitored) -> list[str]:
    return [f"QK-Clip scaled heads {len(reading.clips)} times."] if reading.clips else []


LOGARITHMIC = ("largest", "bound", "sigma", "input_norm", "unscaled", "query_gradient", "key_gradient")


def head_map(reading: Monitored, pyplot: Any, metric: str = "largest", title: str | None = None) -> Any:
    """Heads by steps in the colour of a metric, logarithmic where it has no upper end; alarms are crosses."""
    check_choice("metric", metric, tuple(reading.curves))
    values = np.array([[np.nan if v is None else v for v in curve] for curve in reading.curves[metric]])
    figure, axis = pyplot.subplots(figsize=(6.4, 1.4 + 0.06 * len(values)), layout="constrained")
    colours = optional("matplotlib.colors", "plot")
    ramp = colours.LinearSegmentedColormap.from_list("metric", ["#f2f4f6", LIGHT["skew"]])
    positive = values[values > 0]
    norm = colours.LogNorm() if metric in LOGARITHMIC and positive.size else None
    shown = np.where(values > 0, values, np.nan) if norm else values
    extent = (-0.5, len(reading.steps) - 0.5, len(values) - 0.5, -0.5)
    image = axis.imshow(shown, cmap=ramp, norm=norm, aspect="auto", extent=extent, interpolation="nearest")
    plain = optional("matplotlib.ticker", "plot").FormatStrFormatter("%g") if norm else None  # others write TeX
    figure.colorbar(image, label=f"{metric.replace('_', ' ')} ({reading.units[metric]})", format=plain)
    if marks := _marks(reading):
        axis.plot(*zip(*((record, head) for head, record in marks), strict=True), "x", color="#24292f", markersize=3)
    ticks = np.linspace(0, len(reading.steps) - 1, min(len(reading.steps), 6)).round().astype(int)
    axis.set_xticks(ticks, [str(reading.steps[tick]) for tick in ticks])
    axis.set(xlabel="step", ylabel="head, by layer", title=title or reading.model["name"])
    return figure


FIGURES = {"map": head_map}


def page(reading: Monitored) -> str:
    """The page: any metric over heads and steps, with alarms marked, and the curve of one head."""
    measures = []
    for metric, curves in reading.curves.items():
        if metric != "finite":
            options: dict[str, Any] = {"unit": reading.units.get(metric), "logs": metric in LOGARITHMIC}
            values, tones = [value for curve in curves for value in curve], ["var(--above)", "var(--skew)"]
            measures.append(measure(metric, metric.replace("_", " "), values, DIGITS, tones=tones, **options))
    start, columns, marks = _shared_start(reading), [str(step) for step in reading.steps], _marks(reading)
    rows = [head["name"][len(start) :] for head in reading.heads]
    frame = {"rows": rows, "columns": columns, "nouns": ["head", "step"], "join": "/", "measures": measures}
    alarms = [f"step {alarm['step']}: {alarm['reason']}" for alarm in reading.alarms]
    first = f"{counted(len(alarms), 'alarm')}, the first at {alarms[0]}" if alarms else "No alarms."
    map_ = {"type": "map", "title": "Heads by steps", "plane": True, "pickers": True}
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": [first, *_clips(reading)]},
        {**map_, "marks": marks, "marked": "crosses: alarms"},
        {"type": "curve", "row": True, "unit": "step", "uses": ["map", "at"]},
        {"type": "list", "title": "Alarms", "items": alarms, "none": "none"},
    ]
    row, column = marks[0] if marks else (0, len(columns) - 1)
    state = {"at": f"{rows[row]}/{columns[column]}", "map": measures[0]["key"]}
    facts = f"{len(rows)} heads of {start or reading.model['name']} · {len(columns)} records"
    tab, notes = {"frame": frame, "state": state, "blocks": blocks}, versioned([], reading.provenance)
    return document(str(reading.model["name"]), "training, monitored", [tab], facts, notes)


def _marks(reading: Monitored) -> list[list[int]]:
    """Head and record of every alarm."""
    record = {step: number for number, step in enumerate(reading.steps)}
    return [[head, record[alarm["step"]]] for alarm in reading.alarms for head in alarm["heads"]]
