"""Flow in the terminal: layer by layer, and the heads that are furthest above chance."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from keyquery.instruments.flow.flow import Flow
from keyquery.report.flow.page import depths, grid, views

MOST = 8  # heads, and layers from which on only some are shown
LAYERS = 48


def flow_lines(reading: Flow) -> list[Any]:
    """Title, what is counted, a row a layer, and the strongest heads."""
    model = reading.model
    deep = f"{model['layers']} layers, " if "layers" in model else ""
    title = f"{model['name']}: {deep}{model['heads']} head{'s' if model['heads'] > 1 else ''}"
    counted = ", ".join(f"{reading.counts[name]} {name}" for name in reading.modalities)
    left = [f"{count} {name} left out" for name, count in reading.counts.items() if name not in reading.modalities]
    lines: list[Any] = [Text(title, style="bold"), Text("; ".join([f"tokens: {counted}", *left]), style="dim"), ""]
    lines += [_layers(reading), "", *_heads(reading)]
    raw, chance = np.mean(reading.raw), np.mean(reading.chance_of("raw"))
    lines += ["", f"Attention that crosses: {raw:.1%} on average, {_points(raw - chance)} points from chance."]
    lines += [Text(_looks_back(reading), style="dim")]
    return [*lines, *(f"Note: {note}." for note in reading.notes)]


def _layers(reading: Flow) -> Table:
    pairs = [pair for pair in reading.directed if pair[0] != pair[1]]
    several = len(pairs) <= 2
    table = Table(box=None, pad_edge=False, header_style="")
    names = ["layer", "crosses", "chance", "above", *(f"{a} → {b}" for a, b in pairs if several)]
    weighted = reading.of("weighted", corrected=True)
    names += [*(["weighted above"] if weighted is not None else []), "rolled out", "above"]
    for name in names:
        table.add_column(Text(name), justify="right")
    ways = [grid(reading, share).mean(1) for pair, share in reading.directed.items() if pair in pairs and several]
    carried = None if weighted is None else grid(reading, weighted).mean(1)
    for layer, (raw, chance, deep, far) in enumerate(depths(reading)[:LAYERS]):
        cells = [str(layer), f"{raw:.1%}", f"{chance:.1%}", _points(raw - chance)]
        cells += [f"{way[layer]:.1%}" for way in ways]
        cells += [] if carried is None else [_points(float(carried[layer]))]
        table.add_row(*cells, f"{deep:.1%}", _points(deep - far))
    return table


def _heads(reading: Flow) -> list[str]:
    seen = views(reading)
    values = seen.get("net of sinks", seen["flow"])
    order = np.argsort(-values, axis=None)[:MOST]
    places = [divmod(int(place), values.shape[1]) for place in order]
    told = ", ".join(f"{layer}.{head} {_points(float(values[layer, head]))}" for layer, head in places)
    net = ", net of sinks" if "net of sinks" in seen else ""
    return [f"Heads furthest above chance{net}, in points: {told}."]


def _looks_back(reading: Flow) -> str:
    back = grid(reading, reading.reciprocity)
    if np.isnan(back).all():
        return "Whether the flow is reciprocal cannot be told: no pair may look both ways, or nothing varies."
    return f"Reciprocity, the correlation of who looks with who is looked at: {np.nanmean(back):+.2f} on average."


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"
