"""Causal graphs as SVG."""

from __future__ import annotations

import math
from html import escape

from keyquery.instruments.causes.causes import Causes
from keyquery.pages.colours import EDGES, EDGES_DARK
from keyquery.report.causes.layout import KINDS, MEANS, Arc, Ring, kinds, rings, short, tips


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


def svg(reading: Causes) -> str:
    """All panels as one SVG, for light and dark backgrounds."""
    label = f"Causal graph over {len(reading.nodes)} tokens, from the attention of {reading.model['name']}"
    return drawing(rings(reading), kinds(reading), str(reading.model["name"]), label)


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
