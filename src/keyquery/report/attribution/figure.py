"""Attributions and wirings as figures: tables of sources as maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.attribution.attribution import Attribution
from keyquery.instruments.attribution.wiring import SIDES, Wiring
from keyquery.pages.colours import LIGHT
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional

SHOWN = 12  # sources on each side


def attribution_map(reading: Attribution, pyplot: Any, view: str | None = None) -> Any:
    """The largest sources of both sides: query-side rows by key-side columns."""
    view = view or ("relative" if reading.query is not None else "share")
    check_choice("view", view, tuple(reading.table))
    rows, columns = (list(reading.by_source(side, view))[:SHOWN] for side in SIDES)
    place = {source: index for index, source in enumerate(reading.sources)}
    values = np.asarray(reading.table[view])[np.ix_([place[s] for s in rows], [place[s] for s in columns])]
    figure, axis = pyplot.subplots(figsize=(1.6 + 0.3 * len(columns), 1.5 + 0.24 * len(rows)), layout="constrained")
    _map(figure, axis, values, f"{view} score" if reading.query is not None else "share of the score variance")
    axis.set_xticks(range(len(columns)), columns, rotation=60, ha="right")
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel="key side", ylabel="query side")
    where = "all pairs" if reading.query is None else f"{reading.query} → {reading.key}"
    figure.suptitle(f"{reading.model['name']}, head {reading.head}: {where}", weight="bold")
    return figure


def wiring_map(reading: Wiring, pyplot: Any, side: str = "key") -> Any:
    """Sources by heads: shares of score variance on one side; cells within their null are left white."""
    check_choice("side", side, SIDES)
    sources, values = wiring_grid(reading, side)
    figure, axis = pyplot.subplots(
        figsize=(2 + 0.024 * values.shape[1] + 2, 1.5 + 0.02 * len(sources) + 1.5), layout="constrained"
    )
    _map(figure, axis, values, f"share of the score variance, {side} side")
    starts = [i for i, head in enumerate(reading.heads) if i == 0 or head["layer"] != reading.heads[i - 1]["layer"]]
    every = max(1, len(starts) // 10)
    axis.set_xticks(starts[::every], [reading.heads[i]["layer"] for i in starts[::every]])
    step = max(1, len(sources) // 25)
    axis.set_yticks(range(0, len(sources), step), sources[::step])
    axis.set(xlabel="heads, by layer", ylabel="source")
    figure.suptitle(str(reading.model["name"]), weight="bold")
    return figure


def wiring_grid(reading: Wiring, side: str) -> tuple[list[str], np.ndarray]:
    """All sources, and their shares in every head, (sources, heads); 0 where a share is not above its null."""
    sources = list(dict.fromkeys(source for layer in reading.layers for source in layer["sources"]))
    place = {source: index for index, source in enumerate(sources)}
    values = np.zeros((len(sources), len(reading.heads)))
    of_layer = {layer["layer"]: [place[source] for source in layer["sources"]] for layer in reading.layers}
    for column, head in enumerate(reading.heads):
        share, low, null = (np.asarray(head[side][name]) for name in ("share", "low", "null"))
        values[of_layer[head["layer"]], column] = np.where(low > null, share, 0.0)
    return sources, values


def _map(figure: Any, axis: Any, values: np.ndarray, label: str) -> None:
    steps = [LIGHT["skew"], "#f6f8fa", LIGHT["symmetric"]]
    colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("shares", steps)
    most = float(np.abs(values).max()) or 1.0
    image = axis.imshow(values, vmin=-most, vmax=most, cmap=colours, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axis, shrink=0.8, ticks=[-most, 0, most], label=label)
    bar.ax.set_yticklabels([f"−{most:.2g}", "0", f"+{most:.2g}"])
