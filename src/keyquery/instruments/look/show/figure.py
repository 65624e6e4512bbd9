"""Looks as matplotlib figures: the triangle of variance shares, and maps of symmetry."""

from __future__ import annotations

import math
from typing import Any

from keyquery.instruments.look.compare import Comparison
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.shares import has_data
from keyquery.instruments.look.show.triangle import (
    CORNERS,
    HINT,
    LEGEND,
    about,
    barycentric,
    check_joined,
    dots,
    strength,
)
from keyquery.instruments.look.show.triangle import svg as triangles
from keyquery.pages.colours import LIGHT, PLAIN, depth_colour
from keyquery.support.extras import optional


def looks_of(reading: Look | Comparison) -> list[Look]:
    """The looks in a look or a comparison."""
    return list(reading.looks) if isinstance(reading, Comparison) else [reading]


def default_figure(reading: Look | Comparison, pyplot: Any, **options: Any) -> Any:
    """The triangle if there is data, else the map of symmetry."""
    draw = triangle_figure if any(map(has_data, looks_of(reading))) else symmetry_map
    return draw(reading, pyplot, **options)


def svg(reading: Look | Comparison, joined: bool = False) -> str:
    """The triangle as SVG, without matplotlib."""
    return triangles(*looks_of(reading), joined=joined)


def triangle_figure(reading: Look | Comparison, pyplot: Any, title: str | None = None, joined: bool = False) -> Any:
    """One bubble per head between symmetric, skew and popularity; a triangle per model, or `joined` by arrows."""
    looks = looks_of(reading)
    if joined:
        check_joined(looks)
    panels = looks[-1:] if joined else looks
    size = (3.3 * len(panels), 3.3)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, look in zip(axes[0], panels, strict=True):
        _frame(axis, look)
        axis.set_title(title or look.model["name"], pad=24)
        axis.text(0.5, 1.045, about(look), transform=axis.transAxes, ha="center", color="#59636e", size=6.5)
        if joined:
            _arrows(axis, *looks)
        else:
            _dots(axis, look)
    colours = optional("matplotlib.colors", "plot").ListedColormap([depth_colour(i / 32) for i in range(33)])
    shown = pyplot.cm.ScalarMappable(pyplot.Normalize(0, 1), colours)
    bar = figure.colorbar(shown, ax=axes, shrink=0.4, aspect=28, location="bottom", ticks=[0, 1])
    bar.ax.set_xticklabels(["first layer", "last layer"])
    bar.outline.set_visible(False)
    return figure


def _frame(axis: Any, look: Look) -> None:
    tall = math.sqrt(3) / 2
    axis.set(xlim=(-0.08, 1.08), ylim=(-0.13, tall + 0.06), aspect="equal")
    axis.axis("off")
    names = {"symmetric": (-0.06, -0.03, "left"), "skew": (1.06, -0.03, "right")}
    for part, (x, y, side) in names.items():
        axis.text(x, y, part, color=LIGHT[part], weight="bold", ha=side, va="top")
        axis.text(x, y - 0.055, PLAIN[part], color="#59636e", ha=side, va="top")
    if not has_data(look):
        axis.plot([0, 1], [0, 0], color="#8b949e", lw=0.8)
        axis.text(0.5, tall + 0.02, HINT, color="#59636e", ha="center", size=6.5)
        return
    for share in (0.25, 0.5, 0.75):
        for i in range(3):
            ends = ([share, 1 - share, 0.0], [share, 0.0, 1 - share])
            xs, ys = zip(*(barycentric(*(end[-i:] + end[:-i])) for end in ends), strict=True)
            axis.plot(xs, ys, color="#d8dee4", lw=0.5, zorder=0)
    axis.plot([0, 1, 0.5, 0], [0, 0, tall, 0], color="#8b949e", lw=0.8, zorder=1)
    top = CORNERS[2]
    axis.text(0.5, tall + 0.02, f"{top}: {PLAIN[top]}", color=LIGHT[top], weight="bold", ha="center")


def _dots(axis: Any, look: Look) -> None:
    """A bubble per head, filled by the share of its variance that the triangle shows, and its 95 % region."""
    bubbles = dots(look)
    xs, ys = [dot.x for dot in bubbles], [dot.y for dot in bubbles]
    colours = [depth_colour(dot.depth) for dot in bubbles]
    for dot in bubbles:
        if dot.region:
            axis.fill(*zip(*dot.region, strict=True), color=depth_colour(dot.depth), alpha=0.13, lw=0.3, zorder=2)
    axis.scatter(xs, ys, s=[40 * dot.filled for dot in bubbles], c=colours, linewidths=0, zorder=3)
    rims = [f"{depth_colour(dot.depth)}{round(255 * strength(dot)):02x}" for dot in bubbles]
    axis.scatter(xs, ys, s=40, facecolors="none", edgecolors=rims, linewidths=0.6, zorder=3)
    if has_data(look):
        axis.text(0.5, -0.03, LEGEND.replace("; ", "\n"), color="#59636e", ha="center", va="top", size=6.5)


def _arrows(axis: Any, first: Look, second: Look) -> None:
    after = {(dot.layer, dot.head): dot for dot in dots(second)}
    for dot in dots(first):
        end = after[dot.layer, dot.head]
        style = {"arrowstyle": "-|>", "color": depth_colour(dot.depth), "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
        style["alpha"] = strength(end)
        axis.annotate("", (end.x, end.y), (dot.x, dot.y), arrowprops={**style, "mutation_scale": 6})


def symmetry_map(reading: Look | Comparison, pyplot: Any, title: str | None = None) -> Any:
    """Symmetry of the weights (raw), layers by heads."""
    looks = looks_of(reading)
    shapes = [[1 + max(head[way] for head in look.heads) for way in ("layer", "head")] for look in looks]
    width, height = sum(1.1 + 0.25 * s[1] for s in shapes), 1.0 + 0.25 * max(s[0] for s in shapes)
    steps = [LIGHT["skew"], "#f2f4f6", LIGHT["symmetric"]]
    colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("parts", steps)
    figure, axes = pyplot.subplots(1, len(looks), figsize=(width + 0.8, height), layout="constrained", squeeze=False)
    for axis, look, (rows, columns) in zip(axes[0], looks, shapes, strict=True):
        grid = [[float("nan")] * columns for _ in range(rows)]
        for head in look.heads:
            grid[head["layer"]][head["head"]] = head["raw"]["symmetry"]
        image = axis.imshow(grid, vmin=-1, vmax=1, cmap=colours)
        axis.set(xlabel="head", ylabel="layer", title=title or look.model["name"])
        axis.locator_params(integer=True, nbins=12)
    bar = figure.colorbar(image, ax=axes, ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["skew (−1)", "random (0)", "symmetric (1)"])
    bar.set_label("symmetry of the weights, raw")
    return figure


FIGURES = {"auto": default_figure, "triangle": triangle_figure, "map": symmetry_map}
