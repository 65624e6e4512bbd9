"""Figures of looks: the triangle, one bubble per head between symmetric, skew and popularity, and maps of symmetry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from keyquery.checkpoints.labels import name_of
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.compare import Comparison
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.shares import has_data, window
from keyquery.pages.colours import DARK, LIGHT, PLAIN, depth_colour
from keyquery.support.extras import optional
from keyquery.support.printable import printable

SIDE, LEFT, TOP, WIDTH, HEIGHT = 360.0, 40.0, 96.0, 440.0, 530.0  # of one panel, in user units
TALL = SIDE * math.sqrt(3) / 2
MIDDLE, BELOW = LEFT + SIDE / 2, TOP + TALL
BUBBLE, SMALL, MANY = 7.5, 4.5, 300  # radius of a bubble, and radius if there are more than MANY heads
CORNERS = dict(zip(PARTS[:3], ((0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(3) / 2)), strict=True))  # at side 1
JOINT = 1.249  # √5.99/1.96: a joint 95 % region of two variables is wider than their intervals
CORNER_POINTS = 20  # of the outline of a 95 % region
HINT = "Shares of score variance need data: keyquery look MODEL --text FILE"
GREY = "#59636e"  # of notes
LEGEND = "filled: these three parts; open: position, query_only"
STYLE = f"""
.triangle text {{ font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }}
.triangle .title {{ font-size: 17px; font-weight: 600 }} .triangle .note {{ fill: #59636e }}
.triangle .corner {{ font-size: 14px; font-weight: 600 }} .triangle .frame {{ fill: none; stroke: #8b949e }}
.triangle .grid {{ stroke: #d8dee4; stroke-width: 1 }}
.triangle .bubble {{ fill: #fff; fill-opacity: .01; stroke-width: 1.1 }}
.triangle .region {{ fill-opacity: .13; stroke-opacity: .35; stroke-width: .7 }}
{" ".join(f".triangle .{part} {{ fill: {LIGHT[part]} }}" for part in CORNERS)}
@media (prefers-color-scheme: dark) {{
  .triangle text {{ fill: #f0f6fc }} .triangle .note {{ fill: #9198a1 }} .triangle .frame {{ stroke: #6e7681 }}
  .triangle .grid {{ stroke: #2d333b }} .triangle .region {{ fill-opacity: .22 }}
  {" ".join(f".triangle .{part} {{ fill: {DARK[part]} }}" for part in CORNERS)}
}}
"""


@dataclass(frozen=True)
class Dot:
    """One head: x to the right and y upwards, in units of the triangle's side; depth and `filled` in [0, 1]."""

    layer: int
    head: int
    x: float
    y: float
    depth: float
    filled: float  # share of its variance that the triangle shows
    title: str
    region: Sequence[tuple[float, float]] = ()  # outline of the 95 % region of its position


def barycentric(symmetric: float, skew: float, popularity: float) -> tuple[float, float]:
    """Position of three shares, negative ones as 0; a head with none of the three is in the centre."""
    shares = [max(share, 0.0) for share in (symmetric, skew, popularity)]
    shares = shares if any(shares) else [1.0] * 3
    x, y = (sum(s * corner[i] for s, corner in zip(shares, CORNERS.values(), strict=True)) for i in range(2))
    return x / sum(shares), y / sum(shares)


# Lines of equal shares of a quarter, a half and three quarters.
GRID = [
    [barycentric(*(end[-i:] + end[:-i])) for end in ([share, 1 - share, 0.0], [share, 0.0, 1 - share])]
    for share in (0.25, 0.5, 0.75)
    for i in range(3)
]


def filled(data: Mapping[str, float]) -> float:
    """The share of a head's parts that the triangle shows: all but position and query_only."""
    shares = {part: max(data[part], 0.0) for part in PARTS}
    return sum(shares[part] for part in CORNERS) / (sum(shares.values()) or 1.0)


def region(data: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The outline of the 95 % region of a head, from the intervals of its shares; empty where there are none.

    With independent shares, J the Jacobian of x and y in these and h the half-widths of their intervals, an ellipse
    of covariance J·diag(h²)·Jᵀ, clipped at the triangle.
    """
    intervals = data.get("intervals") or {}
    ends = [intervals[part] for part in CORNERS if intervals.get(part)]
    total = sum(max(data[part], 0.0) for part in CORNERS)
    if len(ends) < len(CORNERS) or total <= 0:
        return []
    x, y = barycentric(*(data[part] for part in CORNERS))
    halves = [JOINT * (high - low) / 2 / total for low, high in ends]
    corners = zip(CORNERS.values(), halves, strict=True)
    dx, dy = zip(*(((right - x) * half, (up - y) * half) for (right, up), half in corners), strict=True)
    # The Cholesky factor of the covariance maps the unit circle to the ellipse.
    wide = math.hypot(*dx)
    across = sum(a * b for a, b in zip(dx, dy, strict=True)) / wide if wide > 0 else 0.0
    tall = math.sqrt(max(sum(b * b for b in dy) - across**2, 0.0))
    turns = [2 * math.pi * i / CORNER_POINTS for i in range(CORNER_POINTS)]
    return [_inside(x + wide * math.cos(t), y + across * math.cos(t) + tall * math.sin(t)) for t in turns]


def _inside(x: float, y: float) -> tuple[float, float]:
    """A point clipped to the triangle."""
    p = y / (math.sqrt(3) / 2)
    return barycentric(1 - (x + p / 2), x - p / 2, p)


def dots(look: Look) -> list[Dot]:
    """A dot per head: in the triangle on data, else on its layer's line between the two lower corners."""
    depths, placed, on_data = _depths(look), [], has_data(look)
    for head in look.heads:
        label = name_of(look.model, head["layer"]).partition(" ")[2]
        name = f"layer {head['layer']}{f' ({label})' if label else ''}, head {head['head']}"
        depth, data = depths[head["layer"]], head["on_data"]
        if data and "symmetric" in data:  # cross-attention has no place between the corners
            x, y = barycentric(*(data[part] for part in CORNERS))
            parts = ", ".join(f"{part} {data[part]:.0%}" for part in PARTS if data[part] >= 0.005)
            title = f"{name}: {head['label']}; {parts}"
            placed.append(Dot(head["layer"], head["head"], x, y, depth, filled(data), title, region(data)))
        elif not on_data:
            symmetry = head["raw"]["symmetry"]
            y = (0.95 - 0.9 * depth) * math.sqrt(3) / 2 if len(depths) > 1 else 0.0  # the first layer on top
            title = f"{name}: symmetry {symmetry:+.2f}"
            placed.append(Dot(head["layer"], head["head"], (1 - symmetry) / 2, y, depth, 1.0, title))
    return placed


def _depths(look: Look) -> dict[int, float]:
    """Relative depth, from 0 to 1, by layer."""
    layers = sorted({layer["layer"] for layer in look.layers})
    return {layer: i / max(len(layers) - 1, 1) for i, layer in enumerate(layers)}


def looks_of(reading: Look | Comparison) -> list[Look]:
    """The looks in a look or a comparison."""
    return list(reading.looks) if isinstance(reading, Comparison) else [reading]


def svg(reading: Look | Comparison) -> str:
    """The triangles of looks side by side."""
    looks = looks_of(reading)
    panels = enumerate(map(panel, looks))
    body = "".join(f'<g transform="translate({i * WIDTH:.0f} 0)">{part}</g>\n' for i, part in panels)
    style = f"<style>:root {{ color-scheme: light dark }}{STYLE}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {_size(looks, WIDTH * len(looks))}>\n{style}\n{body}</svg>\n'


def inline(look: Look, named: bool = True) -> str:
    """One panel as an element of a page, whose style must include STYLE, and whose script describes the heads."""
    return f"<svg {_size([look], WIDTH, 0 if named else 26)}>{panel(look, named, titled=False)}</svg>"


def panel(look: Look, named: bool = True, titled: bool = True) -> str:
    """Heading, frame, 95 % regions, bubbles and legend of one look, as SVG without the outer element."""
    placed = dots(look)
    radius = BUBBLE if len(placed) <= MANY else SMALL
    regions = [_region(dot, radius) for dot in placed]
    bubbles = [_bubble(dot, radius, titled) for dot in placed]
    return "".join([_heading(look, named), _frame(look), *regions, *bubbles, _legend(look, placed)])


def _size(looks: Sequence[Look], width: float, top: float = 0) -> str:
    names = " and ".join(look.model["name"] for look in looks)
    corners = "symmetric, skew and popularity" if any(map(has_data, looks)) else "symmetric and skew"
    label = escape(f"Every head of {names} between {corners}: one bubble per head")
    tall = HEIGHT - top
    box = f'viewBox="0 {top:.0f} {width:.0f} {tall:.0f}" width="{width:.0f}" height="{tall:.0f}"'
    return f'class="triangle" {box} role="img" aria-label="{label}"'


def _position(x: float, y: float) -> tuple[float, float]:
    """From units of the triangle's side, upwards, to SVG user units, downwards."""
    return LEFT + SIDE * x, TOP + TALL - SIDE * y


def _text(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _path(points: Sequence[tuple[float, float]], kind: str, digits: int = 1, colours: str = "") -> str:
    """A line between two points, or a closed one through more, in units of the triangle's side."""
    shape = "L".join(f"{x:.{digits}f} {y:.{digits}f}" for x, y in (_position(*point) for point in points))
    return f'<path class="{kind}" d="M{shape}{"Z" if len(points) > 2 else ""}"{colours}/>'


def about(look: Look) -> str:
    """The number of heads, the data and the window, in one line."""
    shown, data = len(dots(look)), look.provenance.get("data")
    heads = f"{shown} heads" if shown == len(look.heads) else f"{shown} of {len(look.heads)} heads"
    return f"{heads}; {printable(str(data['from']), 20)}: {window(look)}" if data else f"{heads}; weights only"


def _heading(look: Look, named: bool) -> str:
    title = _text(MIDDLE, 24, printable(str(look.model["name"]), 43), "title") if named else ""
    return title + _text(MIDDLE, 44, about(look), "note")


def _frame(look: Look) -> str:
    captions = {"symmetric": (LEFT - 20, BELOW + 24, "start"), "skew": (LEFT + SIDE + 20, BELOW + 24, "end")}
    grid, corners = [[barycentric(1, 1, 0), CORNERS["popularity"]]], [*CORNERS.values()]
    hint = _text(MIDDLE, TOP - 24, HINT, "note")
    if has_data(look):
        captions["popularity"], grid, hint = (MIDDLE, TOP - 28, "middle"), GRID, ""
    parts = [hint, *(_path(ends, "grid") for ends in grid), _path(corners[: len(captions)], "frame")]
    for part, (x, y, anchor) in captions.items():
        parts += [_text(x, y, part, f"corner {part}", anchor), _text(x, y + 18, PLAIN[part], "note", anchor)]
    return "".join(parts)


def _bubble(dot: Dot, radius: float, titled: bool) -> str:
    x, y = _position(dot.x, dot.y)
    centre, colour = f'cx="{x:.1f}" cy="{y:.1f}"', depth_colour(dot.depth)
    inner = f'<circle class="dot" {centre} r="{radius * math.sqrt(dot.filled):.1f}" fill="{colour}"/>'
    rim = f'stroke="{colour}" stroke-opacity="{strength(dot):.2f}"'
    title = f"<title>{escape(dot.title)}</title>" if titled else ""
    outer = f'<circle class="bubble" {centre} r="{radius}" {rim}/>'
    return f'<g class="head" data-head="{dot.layer}.{dot.head}">{inner}{outer}{title}</g>'


def _region(dot: Dot, radius: float) -> str:
    """The 95 % region of a dot, if any of it lies outside the bubble."""
    if all(SIDE * math.hypot(x - dot.x, y - dot.y) <= radius for x, y in dot.region):
        return ""
    colour = depth_colour(dot.depth)
    return _path(dot.region, "region", 0, f' fill="{colour}" stroke="{colour}"')


def strength(dot: Dot) -> float:
    """Opacity of a head: the less of it the triangle shows, the fainter."""
    return 0.35 + 0.65 * dot.filled


def _legend(look: Look, placed: Sequence[Dot]) -> str:
    """Legend of filled and open bubbles, a colour bar of depth with one step per layer, and a note on ellipses."""
    parts, y = [], HEIGHT - 46
    if has_data(look):
        centre = f'cx="{LEFT - 12}" cy="{y - 4.5}"'
        parts.append(f'<circle class="note" {centre} r="{BUBBLE * math.sqrt(0.4):.1f}"/>')
        parts.append(f'<circle fill="none" stroke="#8b949e" {centre} r="{BUBBLE}"/>')
        parts.append(_text(LEFT + 2, y, LEGEND, "note", "start"))
    depths, y = _depths(look), HEIGHT - 20
    step = 96 / len(depths)
    parts += ['<g class="depths">', _text(LEFT - 20, y, f"layer {min(depths)}", "note", "start")]
    for i, depth in enumerate(depths.values()):
        box = f'x="{LEFT + 34 + i * step:.2f}" y="{y - 10}" width="{step + 0.3:.2f}" height="11"'
        parts.append(f'<rect {box} fill="{depth_colour(depth)}"/>')
    parts += [_text(LEFT + 136, y, str(max(depths)), "note", "start"), "</g>"]
    if missing := len(look.heads) - len(placed):
        parts.append(_text(LEFT + SIDE + 20, y, f"{missing} cross-attention heads omitted", "note", "end"))
    elif any(dot.region for dot in placed):
        parts.append(_text(LEFT + SIDE + 20, y, "ellipses: 95 % regions", "note of-regions", "end"))
    return "".join(parts)


# In matplotlib


def default_figure(reading: Look | Comparison, pyplot: Any) -> Any:
    """The triangle if there is data, else the map of symmetry."""
    draw = triangle_figure if any(map(has_data, looks_of(reading))) else symmetry_map
    return draw(reading, pyplot)


def triangle_figure(reading: Look | Comparison, pyplot: Any) -> Any:
    """A triangle per model in matplotlib."""
    looks = looks_of(reading)
    size = (3.3 * len(looks), 3.3)
    figure, axes = pyplot.subplots(1, len(looks), figsize=size, layout="constrained", squeeze=False)
    for axis, look in zip(axes[0], looks, strict=True):
        axis.set_title(look.model["name"], pad=24)
        axis.text(0.5, 1.045, about(look), transform=axis.transAxes, ha="center", color=GREY, size=6.5)
        _draw_frame(axis, has_data(look))
        _draw_dots(axis, dots(look))
    colours = optional("matplotlib.colors", "plot").ListedColormap([depth_colour(i / 32) for i in range(33)])
    shown = pyplot.cm.ScalarMappable(pyplot.Normalize(0, 1), colours)
    bar = figure.colorbar(shown, ax=axes, shrink=0.4, aspect=28, location="bottom", ticks=[0, 1])
    bar.ax.set_xticklabels(["first layer", "last layer"])
    bar.outline.set_visible(False)
    return figure


def _draw_frame(axis: Any, on_data: bool) -> None:
    tall = math.sqrt(3) / 2
    axis.set(xlim=(-0.08, 1.08), ylim=(-0.13, tall + 0.12), aspect="equal")
    axis.axis("off")
    captions = {"symmetric": (-0.06, -0.03, "left"), "skew": (1.06, -0.03, "right")}
    if on_data:
        captions["popularity"] = (0.5, tall + 0.12, "center")
    for part, (x, y, side) in captions.items():
        axis.text(x, y, part, color=LIGHT[part], weight="bold", ha=side, va="top")
        axis.text(x, y - 0.055, PLAIN[part], color=GREY, ha=side, va="top")
    note = (0.5, -0.03, LEGEND.replace("; ", "\n")) if on_data else (0.5, tall + 0.07, HINT)
    axis.text(*note, color=GREY, ha="center", va="top", size=6.5)
    for ends in GRID if on_data else []:
        axis.plot(*zip(*ends, strict=True), color="#d8dee4", lw=0.5, zorder=0)
    corners = [*CORNERS.values()][: len(captions)]
    axis.plot(*zip(*corners, corners[0], strict=True), color="#8b949e", lw=0.8, zorder=1)


def _draw_dots(axis: Any, placed: Sequence[Dot]) -> None:
    """A bubble per head, filled by the share of its variance that the triangle shows, and its 95 % region."""
    xs, ys, colours = [dot.x for dot in placed], [dot.y for dot in placed], [depth_colour(dot.depth) for dot in placed]
    for dot, colour in zip(placed, colours, strict=True):
        if dot.region:
            axis.fill(*zip(*dot.region, strict=True), color=colour, alpha=0.13, lw=0.3, zorder=2)
    axis.scatter(xs, ys, s=[40 * dot.filled for dot in placed], c=colours, linewidths=0, zorder=3)
    rims = [f"{colour}{round(255 * strength(dot)):02x}" for dot, colour in zip(placed, colours, strict=True)]
    axis.scatter(xs, ys, s=40, facecolors="none", edgecolors=rims, linewidths=0.6, zorder=3)


def symmetry_map(reading: Look | Comparison, pyplot: Any) -> Any:
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
        axis.set(xlabel="head", ylabel="layer", title=look.model["name"])
        axis.locator_params(integer=True, nbins=12)
    bar = figure.colorbar(image, ax=axes, ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["skew (−1)", "random (0)", "symmetric (1)"])
    bar.set_label("symmetry of the weights, raw")
    return figure


FIGURES = {"auto": default_figure, "triangle": triangle_figure, "map": symmetry_map}
