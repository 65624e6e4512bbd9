"""Causal graphs as a matplotlib figure: the panels of the SVG."""

from __future__ import annotations

import math
from typing import Any

from keyquery.instruments.causes.causes import Causes
from keyquery.pages.colours import EDGES
from keyquery.report.causes.layout import MEANS, Ring, kinds, rings, short, tips
from keyquery.support.extras import optional

TOKENS = {"target": "#cf222e", "cause": "#1f2328", "": "#59636e"}


def graph_figure(reading: Causes, pyplot: Any, head: int | None = None) -> Any:
    """A panel for the consensus and one per head; with `head`, only that head."""
    return panels_figure(rings(reading, head), kinds(reading), str(reading.model["name"]), pyplot)


def panels_figure(panels: list[Ring], present: list[str], title: str, pyplot: Any) -> Any:
    """Panels under a title, and the legend of the `present` kinds of edges."""
    columns = math.ceil(math.sqrt(len(panels)))
    rows, inch = -(-len(panels) // columns), 2 * panels[0].half / 110
    size = (max(columns * inch, 3.6), rows * (inch + 0.35) + 0.5)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel)
    lines = optional("matplotlib.lines", "plot")
    shown = [lines.Line2D([], [], color=EDGES[kind], label=f"{kind}  {MEANS[kind]}") for kind in present]
    if shown:
        figure.legend(handles=shown, loc="outside lower center", ncols=1 if columns == 1 else 5, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure


def _draw(axis: Any, panel: Ring) -> None:
    patches, path = optional("matplotlib.patches", "plot"), optional("matplotlib.path", "plot").Path
    axis.set(xlim=(-panel.half, panel.half), ylim=(panel.half, -panel.half), aspect="equal")
    axis.set_title(f"{panel.title}\n{panel.note}")
    for arc in panel.arcs:
        colour, (first, last) = EDGES[arc.kind], tips(arc)
        curve = path([first.stop, arc.points[1], last.stop], [path.MOVETO, path.CURVE3, path.CURVE3])
        axis.add_patch(patches.PathPatch(curve, fill=False, color=colour, lw=0.6 * arc.width))
        for tip in (first, last):
            if tip.corners:
                axis.add_patch(patches.Polygon(tip.corners, fc=colour, ec="none", zorder=3))
            elif tip.middle:
                axis.add_patch(patches.Circle(tip.middle, 3, fc="white", ec=colour, lw=0.7, zorder=3))
    out = 1 + 9 / panel.radius
    for node, (x, y, angle) in panel.places.items():
        left, kind = math.cos(angle) < 0, panel.strong.get(node, "")
        axis.plot([x], [y], "o", markersize=2.2, color=TOKENS[kind])
        turn = -math.degrees(angle) + (180 if left else 0)
        place = {"ha": "right" if left else "left", "va": "center", "rotation": turn, "rotation_mode": "anchor"}
        word = short(panel.names[node])
        axis.text(x * out, y * out, word, size=6.5, weight="bold" if kind else "normal", **place)
