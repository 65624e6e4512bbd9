"""Flow in the terminal: per layer, and the heads furthest above chance."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from keyquery.instruments.flow.flow import Flow
from keyquery.instruments.flow.modality import CLASS
from keyquery.report.flow.page import depths, grid, views

MOST = 8  # heads that are listed
LAYERS = 48  # layers that are shown


def flow_lines(reading: Flow) -> list[Any]:
    """Title, token counts, a row per layer, and the strongest heads."""
    model = reading.model
    deep = f"{model['layers']} layers, " if "layers" in model else ""
    title = f"{model['name']}: {deep}{model['heads']} head{'s' if model['heads'] > 1 else ''}"
    counted = ", ".join(f"{reading.counts[name]} {name}" for name in reading.modalities)
    left = [f"{count} {name} excluded" for name, count in reading.counts.items() if name not in reading.modalities]
    lines: list[Any] = [Text(title, style="bold"), Text("; ".join([f"tokens: {counted}", *left]), style="dim"), ""]
    lines += [_layers(reading), "", *_heads(reading)]
    raw, chance = np.mean(reading.raw), np.mean(reading.chance_of("raw"))
    between = "Attention between class token and patches" if CLASS in reading.modalities else "Cross-modal attention"
    lines += ["", f"{between}: {raw:.1%} on average, {_points(raw - chance)} points relative to chance."]
    lines += [Text(_reciprocity(reading), style="dim")]
    return [*lines, *(f"Note: {note}." for note in reading.notes)]


def _layers(reading: Flow) -> Table:
    pairs = [pair for pair in reading.directed if pair[0] != pair[1]]
    several = len(pairs) <= 2
    table = Table(box=None, pad_edge=False, header_style="")
    names = ["layer", "flow", "chance", "above", *(f"{a} → {b}" for a, b in pairs if several)]
    weighted = reading.of("weighted", corrected=True)
    names += [*(["weighted above"] if weighted is not None else []), "rollout", "above"]
    for name in names:
        table.add_column(Text(name), justify="right")
    directions = [grid(reading, share).mean(1) for pair, share in reading.directed.items() if pair in pairs and several]
    norm_weighted = None if weighted is None else grid(reading, weighted).mean(1)
    for layer, (raw, chance, deep, far) in enumerate(depths(reading)[:LAYERS]):
        cells = [str(layer), f"{raw:.1%}", f"{chance:.1%}", _points(raw - chance)]
        cells += [f"{way[layer]:.1%}" for way in directions]
        cells += [] if norm_weighted is None else [_points(float(norm_weighted[layer]))]
        table.add_row(*cells, f"{deep:.1%}", _points(deep - far))
    return table


def _heads(reading: Flow) -> list[str]:
    seen = views(reading)
    values = seen.get("net of sinks", seen["flow"])
    order = np.argsort(-values, axis=None)[:MOST]
    places = [divmod(int(place), values.shape[1]) for place in order]
    listed = ", ".join(f"{layer}.{head} {_points(float(values[layer, head]))}" for layer, head in places)
    net = ", net of sinks" if "net of sinks" in seen else ""
    return [f"Heads furthest above chance{net}, in points: {listed}."]


def _reciprocity(reading: Flow) -> str:
    back = grid(reading, reading.reciprocity)
    if np.isnan(back).all():
        return "Reciprocity is undefined: no pair of tokens can attend both ways, or attention does not vary."
    return f"Reciprocity, the correlation of attention i → j with j → i: {np.nanmean(back):+.2f} on average."


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"
