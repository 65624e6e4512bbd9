"""Causal graphs: nodes on a ring, in reading order, with marked edges between them; as SVG and in matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from keyquery.pages.colours import EDGES, EDGES_DARK
from keyquery.support.extras import optional

Edge = tuple[int, int, str, str]  # two nodes, and the mark at either end

# The kind of an edge by its two marks, in alphabetical order.
KINDS = {
    ("arrow", "arrow"): "↔",
    ("arrow", "circle"): "o→",
    ("arrow", "tail"): "→",
    ("circle", "circle"): "o–o",
    ("circle", "tail"): "–",
    ("tail", "tail"): "–",
}
MEANS = {
    "→": "cause",
    "o→": "cause, or latent confounder",
    "↔": "latent confounder",
    "o–o": "undetermined",
    "–": "selection bias",
}
LEAST, APART = 140.0, 24.0  # minimum radius of a ring, and distance between its tokens
BEND = 0.55  # how far edges bend inwards
LONGEST = 16  # characters of a token that are shown
MANY = 45  # edges above which lines get thinner
SIGN = 6.8  # width of a character of a token


@dataclass(frozen=True)
class Arc:
    """An edge to draw: a curve of three points, the mark at each end, its kind and its width."""

    i: int
    j: int
    points: tuple[tuple[float, float], ...]
    marks: tuple[str, str]
    kind: str
    width: float
    title: str


@dataclass(frozen=True)
class Tip:
    """The end of an edge: where its line stops before the token, and the corners or the centre of its mark."""

    stop: tuple[float, float]
    corners: tuple[tuple[float, float], ...] = ()
    middle: tuple[float, float] | None = None


@dataclass(frozen=True)
class Ring:
    """One panel: the position of each token (the centre is 0, 0; y downwards), its angle, and the edges."""

    title: str
    note: str
    radius: float
    half: float  # of the panel's width
    places: dict[int, tuple[float, float, float]]
    arcs: list[Arc]
    names: dict[int, str]
    strong: dict[int, str]  # nodes to highlight, as "target" or "cause"


def kind_of(at_i: str, at_j: str) -> str:
    """The kind of an edge, regardless of its direction."""
    first, second = sorted((at_i, at_j))
    return KINDS[first, second]


def edge_text(first: str, second: str, at_first: str, at_second: str) -> str:
    """An edge between two names as text."""
    if at_first == "arrow" and at_second != "arrow":
        first, second, at_first, at_second = second, first, at_second, at_first
    return f"{first} {kind_of(at_first, at_second)} {second}"


def ring_of(
    names: dict[int, str],
    edges: Sequence[Edge],
    title: str,
    note: str,
    shares: Mapping[tuple[int, int], tuple[float, str]],
    highlighted: dict[int, str],
) -> Ring:
    """A panel of named nodes; `shares` are the weight of an edge and what its tooltip adds. Default: 1 and nothing."""
    radius = max(LEAST, APART * len(names) / (2 * math.pi))
    places = {}
    for index, node in enumerate(names):
        angle = 2 * math.pi * (index + 0.5) / len(names) - math.pi / 2
        places[node] = (radius * math.cos(angle), radius * math.sin(angle), angle)
    fine = min(1.0, math.sqrt(MANY / max(len(edges), 1)))
    arcs = []
    for i, j, at_i, at_j in edges:
        (x1, y1, _), (x2, y2, _) = places[i], places[j]
        keep = (1 - BEND * min(1.0, math.hypot(x2 - x1, y2 - y1) / radius)) / 2  # neighbours need no detour
        middle = ((x1 + x2) * keep, (y1 + y2) * keep)
        share, addition = shares.get((i, j), (1.0, ""))
        curve, label = ((x1, y1), middle, (x2, y2)), edge_text(names[i], names[j], at_i, at_j) + addition
        arcs.append(Arc(i, j, curve, (at_i, at_j), kind_of(at_i, at_j), fine * (0.7 + 1.1 * share), label))
    half = radius + 18 + SIGN * max(len(short(name)) for name in names.values())
    return Ring(title, note, radius, max(half, 150.0), places, arcs, names, highlighted)


def kinds_of(edges: Sequence[Edge]) -> list[str]:
    """The kinds of some edges, in the order of the legend."""
    present = {kind_of(at_i, at_j) for _, _, at_i, at_j in edges}
    return [kind for kind in EDGES if kind in present]


def tips(arc: Arc) -> list[Tip]:
    """Both ends of an edge: a tail is the line itself, an arrowhead has three corners, a circle a centre."""
    (x1, y1), (mx, my), (x2, y2) = arc.points
    ends = []
    for (x, y), mark in (((x1, y1), arc.marks[0]), ((x2, y2), arc.marks[1])):
        long = math.hypot(mx - x, my - y) or 1.0
        dx, dy = (mx - x) / long, (my - y) / long
        bx, by = x + 5 * dx, y + 5 * dy  # beside the dot
        tx, ty = bx + 8 * dx, by + 8 * dy
        if mark == "tail":
            ends.append(Tip((bx, by)))
        elif mark == "circle":
            ends.append(Tip((bx + 6 * dx, by + 6 * dy), middle=(bx + 3 * dx, by + 3 * dy)))
        else:
            sides = (tx - 3.4 * dy, ty + 3.4 * dx), (tx + 3.4 * dy, ty - 3.4 * dx)
            ends.append(Tip((tx, ty), corners=((bx, by), *sides)))
    return ends


def short(token: str, most: int = LONGEST) -> str:
    """A token or a name as a label: unprintable characters replaced, and cut to `most` characters."""
    token = "".join(sign if sign.isprintable() else "�" for sign in token)
    return token if len(token) <= most else token[: most - 1] + "…"


# As SVG


def _tones(colours: dict[str, str]) -> str:
    return " ".join(
        f".graph .k{index} {{ stroke: {colour} }} .graph .k{index} .head {{ fill: {colour} }}"
        for index, colour in enumerate(colours.values())
    )


STYLE = f"""
.graph text {{ font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }}
.graph .title {{ font-size: 15px; font-weight: 600 }} .graph .note {{ fill: #59636e }}
.graph .dot {{ fill: #59636e }} .graph .target .dot {{ fill: #cf222e }} .graph .target text {{ font-weight: 700 }}
.graph .cause text {{ font-weight: 700 }} .graph .cause .dot {{ fill: #1f2328 }}
.graph .edge path {{ fill: none }} .graph .edge .head {{ stroke: none }} .graph .edge circle {{ fill: #fff }}
{_tones(EDGES)}
@media (prefers-color-scheme: dark) {{
  .graph text {{ fill: #e6edf3 }} .graph .note {{ fill: #9198a1 }} .graph .dot {{ fill: #9198a1 }}
  .graph .target .dot {{ fill: #ff7b72 }} .graph .cause .dot {{ fill: #e6edf3 }} .graph .edge circle {{ fill: #0d1117 }}
  {_tones(EDGES_DARK)}
}}
"""


def drawing(panels: list[Ring], present: list[str], title: str, label: str) -> str:
    """Panels under a title and the legend of the `present` kinds of edges."""
    columns = min(len(panels), max(1, math.ceil(math.sqrt(len(panels)))))
    wide, tall = 2 * panels[0].half, 2 * panels[0].half + 44
    rows = -(-len(panels) // columns)
    width, height = max(columns * wide, 32 + sum(map(_long, present))), rows * tall + 62
    body = ""
    for index, panel in enumerate(panels):
        x, y = (index % columns + 0.5) * width / columns, index // columns * tall + 92 + wide / 2
        body += f'<g transform="translate({x:.1f} {y:.1f})">{panel_svg(panel)}</g>\n'
    top = f'<text class="title" x="16" y="24">{escape(title)}</text>{legend_svg(present, 16, 46)}'
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    style = f"<style>:root {{ color-scheme: light dark }}{STYLE}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" {size} role="img" aria-label="{escape(label)}">'
        f"\n{style}\n{top}\n{body}</svg>\n"
    )


def inline(panel: Ring) -> str:
    """One panel as an element of a page, whose style must include STYLE."""
    half = panel.half
    box = f'viewBox="{-half:.0f} {-half - 40:.0f} {2 * half:.0f} {2 * half + 40:.0f}"'
    return f'<svg class="graph" {box} role="img" aria-label="{escape(panel.title)}">{panel_svg(panel)}</svg>'


def key_inline(kind: str) -> str:
    """The sample of a kind of edge as an element of a page."""
    box = 'viewBox="0 0 40 14" width="40" height="14"'
    return f'<svg class="graph key-edge" {box} data-kind="{kind}" aria-hidden="true">{key_svg(kind, 0, 11)}</svg>'


def panel_svg(panel: Ring) -> str:
    """Title, edges and nodes of a panel around 0, 0."""
    half = panel.half
    parts = [f'<text class="title" x="0" y="{-half - 22:.1f}" text-anchor="middle">{escape(panel.title)}</text>']
    parts.append(f'<text class="note" x="0" y="{-half - 5:.1f}" text-anchor="middle">{escape(panel.note)}</text>')
    parts += [_arc_svg(arc) for arc in panel.arcs]
    out = 1 + 9 / panel.radius
    for node, (x, y, angle) in panel.places.items():
        left = math.cos(angle) < 0
        turn = math.degrees(angle) + (180 if left else 0)
        place = f'transform="translate({x * out:.1f} {y * out:.1f}) rotate({turn:.1f})"'
        side = "end" if left else "start"
        word = f'<text {place} y="4" text-anchor="{side}">{escape(short(panel.names[node]))}</text>'
        kind = f" {panel.strong[node]}" if node in panel.strong else ""
        title = f"<title>{node}: {escape(panel.names[node])}</title>"
        dot = f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        parts.append(f'<g class="node{kind}" data-node="{node}">{dot}{word}{title}</g>')
    return "".join(parts)


def legend_svg(present: list[str], x: float, y: float) -> str:
    """The kinds of edges that occur, and their meanings."""
    parts = []
    for kind in present:
        parts.append(key_svg(kind, x, y))
        parts.append(f'<text class="note" x="{x + 46:.1f}" y="{y:.1f}">{MEANS[kind]}</text>')
        x += _long(kind)
    return "".join(parts)


def key_svg(kind: str, x: float, y: float) -> str:
    """A sample edge of a kind for the legend, 40 units wide."""
    ends = tuple(sorted(next(marks for marks, name in KINDS.items() if name == kind), reverse=True))
    arc = Arc(-1, -1, ((x, y - 4), (x + 20, y - 4), (x + 40, y - 4)), (ends[0], ends[1]), kind, 1.8, "")
    return _arc_svg(arc)


def _long(kind: str) -> float:
    """The width of a kind in the legend."""
    return 66 + 6.4 * len(MEANS[kind])


def _arc_svg(arc: Arc) -> str:
    first, last = tips(arc)
    mx, my = arc.points[1]
    line = f"M{first.stop[0]:.1f} {first.stop[1]:.1f}Q{mx:.1f} {my:.1f} {last.stop[0]:.1f} {last.stop[1]:.1f}"
    marks = ""
    for tip in (first, last):
        if tip.corners:
            marks += f'<path class="head" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in tip.corners)}Z"/>'
        elif tip.middle:
            marks += f'<circle cx="{tip.middle[0]:.1f}" cy="{tip.middle[1]:.1f}" r="3" stroke-width="1.2"/>'
    facts = f'class="edge k{list(EDGES).index(arc.kind)}" data-i="{arc.i}" data-j="{arc.j}"'
    title = f"<title>{escape(arc.title)}</title>" if arc.title else ""
    return f'<g {facts} stroke-width="{arc.width:.2f}"><path d="{line}"/>{marks}{title}</g>'


# In matplotlib

TOKENS = {"target": "#cf222e", "cause": "#1f2328", "": "#59636e"}


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
