"""A Reading as a matplotlib figure."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from keyquery.instruments.geometry import Look
from keyquery.reading import Reading


def plot(reading: Reading, **options: Any) -> Any:
    """The picture of a reading: for a Look, symmetry as a map of layers and heads."""
    if not isinstance(reading, Look):
        raise ValueError(f"a reading of kind {reading.kind!r} has no picture")
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        raise ImportError("plot needs matplotlib: pip install 'keyquery[plot]'") from None
    return _symmetry_map(reading, pyplot, **options)


def _symmetry_map(reading: Look, pyplot: Any, title: str | None = None) -> Any:
    rows = 1 + max(head["layer"] for head in reading.heads)
    columns = 1 + max(head["head"] for head in reading.heads)
    grid = [[float("nan")] * columns for _ in range(rows)]
    for head in reading.heads:
        grid[head["layer"]][head["head"]] = head["raw"]["symmetry"]
    figure, axes = pyplot.subplots(figsize=(1.5 + 0.4 * columns, 1.2 + 0.4 * rows), layout="constrained")
    image = axes.imshow(grid, vmin=-1, vmax=1, cmap="PuOr_r")
    axes.set(xlabel="head", ylabel="layer", title=title or reading.model["name"])
    axes.set_xticks(range(columns))
    axes.set_yticks(range(rows))
    bar = figure.colorbar(image, ax=axes, ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["points (−1)", "random (0)", "compares (1)"])
    return figure
