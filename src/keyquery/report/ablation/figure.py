"""The change of the loss when a part of each head is ablated, as maps of heads."""

from __future__ import annotations

from typing import Any

from keyquery.instruments.ablation.ablate import Ablation
from keyquery.pages.colours import LIGHT, WHOLE
from keyquery.support.extras import optional

BARS = 40  # most directions of a figure


def ablation_map(reading: Ablation, pyplot: Any) -> Any:
    """A panel per part, layers by heads: the change of the loss on a common scale; yellow is a decrease."""
    if reading.by == "direction":
        return _direction_bars(reading, pyplot)
    parts = list(dict.fromkeys(row["part"] for row in reading.rows))
    layers = 1 + max(row["layer"] or 0 for row in reading.rows)
    heads = 1 + max(row["head"] or 0 for row in reading.rows)
    most = max(abs(row["change"]) for row in reading.rows) or 1.0
    size = (len(parts) * max(0.7 + 0.25 * heads, 1.5) + 0.9, 1.4 + 0.25 * layers)
    figure, axes = pyplot.subplots(1, len(parts), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, part in zip(axes[0], parts, strict=True):
        grid = [[float("nan")] * heads for _ in range(layers)]
        for row in reading.rows:
            if row["part"] == part:
                grid[row["layer"] or 0][row["head"] or 0] = row["change"]
        colour = LIGHT.get(part, "#8250df")
        steps = ["#c8a600", "#f2f4f6", colour]
        colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list(part, steps)
        image = axis.imshow(grid, vmin=-most, vmax=most, cmap=colours, aspect="auto")
        axis.set_facecolor("#c4cbd2")  # distinguishes unmeasured cells from zero
        axis.set_title(WHOLE.get(part, f"{part} ablated"), color=colour)
        axis.set_xticks(range(heads) if reading.by == "head" else [])
        axis.set_xlabel("head" if reading.by == "head" else "all heads")
        axis.yaxis.get_major_locator().set_params(integer=True)
        bar = figure.colorbar(image, ax=axis, location="bottom", shrink=0.9, ticks=[-most, 0, most])
        bar.ax.set_xticklabels([f"−{most:.2g}", "0", f"+{most:.2g}"])
    if reading.by == "all":
        axes[0][0].set_yticks([])
    axes[0][0].set_ylabel("all layers" if reading.by == "all" else "layer")
    figure.suptitle(f"{reading.model['name']}: change of the loss ({reading.loss:.2f})")
    return figure


def _direction_bars(reading: Ablation, pyplot: Any) -> Any:
    """A bar per direction with its interval, the costliest on top."""
    rows = reading.rows[:BARS]
    figure, axis = pyplot.subplots(figsize=(6.4, 1.2 + 0.22 * len(rows)), layout="constrained")
    changes = [row["change"] for row in rows]
    errors = [[row["change"] - row["low"] for row in rows], [row["high"] - row["change"] for row in rows]]
    colour = LIGHT.get(rows[0]["part"], "#8250df")
    axis.barh(range(len(rows)), changes, xerr=errors, color=colour, error_kw={"ecolor": "#57606a", "lw": 1})
    axis.set_yticks(range(len(rows)), [f"{row['layer']}.{row['head']}  direction {row['direction']}" for row in rows])
    axis.invert_yaxis()
    axis.axvline(0, color="#57606a", lw=0.8)
    axis.set_xlabel("change of the loss with the direction ablated")
    axis.set_title(f"{reading.model['name']}: {rows[0]['part']} directions, loss {reading.loss:.2f}")
    return figure
