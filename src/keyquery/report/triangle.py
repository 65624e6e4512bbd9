"""The triangle: one dot a head, between comparing, pointing and following the crowd. SVG, written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.geometry import Look
from keyquery.report.colours import DARK, DOES, LIGHT, depth_colour

SIDE, LEFT, TOP, WIDTH, HEIGHT = 360.0, 40.0, 96.0, 440.0, 516.0  # of one panel, in user units
TALL = SIDE * math.sqrt(3) / 2
DOT, RING = 4.5, 15.0  # radius of a dot, and of the ring of a head that minds nothing but the place
PARTS = ("reciprocal", "directional", "popularity")
HINT = "Popularity shows on data: keyquery look MODEL --text FILE"
STYLE = f"""
.triangle text {{ font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }}
.triangle .title {{ font-size: 17px; font-weight: 600 }} .triangle .note {{ fill: #59636e }}
.triangle .corner {{ font-size: 14px; font-weight: 600 }} .triangle .frame {{ fill: none; stroke: #8b949e }}
.triangle .grid {{ stroke: #d8dee4; stroke-width: 1 }}
.triangle .dot {{ stroke: #1f2328; stroke-opacity: .45; stroke-width: .8 }}
.triangle .ring {{ fill: none; stroke: {LIGHT["position"]}; stroke-opacity: .5 }}
{" ".join(f".triangle .{part} {{ fill: {LIGHT[part]} }}" for part in PARTS)}
@media (prefers-color-scheme: dark) {{
  .triangle text {{ fill: #f0f6fc }} .triangle .note {{ fill: #9198a1 }} .triangle .frame {{ stroke: #6e7681 }}
  .triangle .grid {{ stroke: #2d333b }} .triangle .dot {{ stroke: #f0f6fc; stroke-opacity: .75 }}
  .triangle .ring {{ stroke: {DARK["position"]} }}
  {" ".join(f".triangle .{part} {{ fill: {DARK[part]} }}" for part in PARTS)}
}}
"""


@dataclass(frozen=True)
class Dot:
    """One head: x to the right and y upwards, in sides of the triangle; depth and position share in [0, 1]."""

    layer: int
    head: int
    x: float
    y: float
    depth: float
    position: float
    title: str


def barycentric(reciprocal: float, directional: float, popularity: float) -> tuple[float, float]:
    """Where three shares stand in a triangle of side 1: x = (d + p/2)/(r + d + p), y = (√3/2)·p/(r + d + p).

    Reciprocal is the corner (0, 0), directional (1, 0), popularity the one on top. What is left to 1, the position
    share, is taken out; a head that has no other stands in the middle.

    >>> barycentric(1, 0, 0), barycentric(0, 1, 0), barycentric(0.2, 0.2, 0)
    ((0.0, 0.0), (1.0, 0.0), (0.5, 0.0))
    """
    total = reciprocal + directional + popularity
    r, d, p = (share / total for share in (reciprocal, directional, popularity)) if total > 0 else (1 / 3,) * 3
    return (d + p / 2) / (r + d + p), math.sqrt(3) / 2 * p / (r + d + p)


def has_data(look: Look) -> bool:
    """Whether any head was seen on data, so that there is a triangle and not a line."""
    return any(head["on_data"] for head in look.heads)


def dots(look: Look) -> list[Dot]:
    """A dot for every head: in the triangle on data, else on its layer's line between the two lower corners."""
    numbers = sorted({layer["layer"] for layer in look.layers})
    depths = {number: i / max(len(numbers) - 1, 1) for i, number in enumerate(numbers)}
    found, on_data = [], has_data(look)
    for head in look.heads:
        label = name_of(look.model, head["layer"]).partition(" ")[2]
        place = f"layer {head['layer']}{f' ({label})' if label else ''}, head {head['head']}"
        depth, data = depths[head["layer"]], head["on_data"]
        if data:
            x, y = barycentric(*(data[part] for part in PARTS))
            told = ", ".join(f"{part} {data[part]:.0%}" for part in (*PARTS, "position") if data[part] > 0)
            found.append(Dot(head["layer"], head["head"], x, y, depth, data["position"], f"{place}: {told}"))
        elif not on_data:
            symmetry = head["raw"]["symmetry"]
            y = (0.95 - 0.9 * depth) * math.sqrt(3) / 2 if len(numbers) > 1 else 0.0  # the first layer on top
            title = f"{place}: symmetry {symmetry:+.2f}"
            found.append(Dot(head["layer"], head["head"], (1 - symmetry) / 2, y, depth, 0.0, title))
    return found


def svg(*looks: Look, joined: bool = False) -> str:
    """The triangles of looks, side by side, or of two steps of one architecture in one, joined by arrows.

    >>> svg(kq.look(torch.nn.MultiheadAttention(8, 2), name="two heads"))[:38]
    '<svg xmlns="http://www.w3.org/2000/svg'
    """
    if joined:
        panels, width = [_joined(*looks)], WIDTH
    else:
        panels, width = [panel(look) for look in looks], WIDTH * len(looks)
    body = "".join(f'<g transform="translate({i * WIDTH:.0f} 0)">{part}</g>\n' for i, part in enumerate(panels))
    style = f"<style>:root {{ color-scheme: light dark }}{STYLE}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {_size(looks, width)}>\n{style}\n{body}</svg>\n'


def inline(look: Look, heading: bool = True) -> str:
    """One panel as an element of a page, whose own style has STYLE in it."""
    return f"<svg {_size([look], WIDTH, 0 if heading else 50)}>{panel(look, heading)}</svg>"


def panel(look: Look, heading: bool = True) -> str:
    """Heading, frame, dots, rings and legend of one look, as SVG without its outer element."""
    found = dots(look)
    rings = [_ring(dot) for dot in found if dot.position > 0]
    return "".join([_heading(look) if heading else "", _frame(look), *rings, *map(_dot, found), _legend(look, found)])


def check_joined(looks: Sequence[Look]) -> None:
    """Refuse looks that cannot be joined by arrows: they must be two, and have the same heads in the same view."""
    if len(looks) != 2:
        raise ValueError(f"arrows join two looks, got {len(looks)}")
    one, other = ({(dot.layer, dot.head) for dot in dots(look)} for look in looks)
    if one != other or has_data(looks[0]) != has_data(looks[1]):
        raise ValueError("arrows join the same heads of two steps: these looks have other heads, or only one has data")


def _joined(*looks: Look) -> str:
    check_joined(looks)
    before, after = (dots(look) for look in looks)
    there = {(dot.layer, dot.head): dot for dot in after}
    arrows = "".join(_arrow(dot, there[dot.layer, dot.head]) for dot in before)
    return _heading(looks[1], f"from {looks[0].model['name']}") + _frame(looks[1]) + arrows + _legend(looks[1], after)


def _size(looks: Sequence[Look], width: float, top: float = 0) -> str:
    names = " and ".join(look.model["name"] for look in looks)
    label = escape(f"What every head of {names} does: one dot a head, between comparing and pointing")
    label += ", and following the crowd" if any(map(has_data, looks)) else ""
    tall = HEIGHT - top
    box = f'viewBox="0 {top:.0f} {width:.0f} {tall:.0f}" width="{width:.0f}" height="{tall:.0f}"'
    return f'class="triangle" {box} role="img" aria-label="{label}"'


def _at(x: float, y: float) -> tuple[float, float]:
    """From sides of the triangle, upwards, to user units, downwards."""
    return LEFT + SIDE * x, TOP + TALL - SIDE * y


def _text(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _heading(look: Look, note: str = "") -> str:
    data, name = look.provenance.get("data"), str(look.model["name"])
    name = name if len(name) <= 44 else name[:20] + " … " + name[-20:]
    of = f"on {data['from']}, {data['tokens']:,} tokens" if data else "from the weights alone"
    about = ", ".join(part for part in (note, f"{len(look.heads)} heads", of) if part)
    return _text(LEFT + SIDE / 2, 24, name, "title") + _text(LEFT + SIDE / 2, 44, about, "note")


def _frame(look: Look) -> str:
    left, right, top = _at(0, 0), _at(1, 0), _at(0.5, math.sqrt(3) / 2)
    below = TOP + TALL
    parts = [
        _text(LEFT - 20, below + 24, "reciprocal", "corner reciprocal", "start"),
        _text(LEFT - 20, below + 42, DOES["reciprocal"], "note", "start"),
        _text(LEFT + SIDE + 20, below + 24, "directional", "corner directional", "end"),
        _text(LEFT + SIDE + 20, below + 42, DOES["directional"], "note", "end"),
    ]
    if not has_data(look):
        middle = LEFT + SIDE / 2
        line = f'<path class="frame" d="M{left[0]:.1f} {left[1]:.1f}H{right[0]:.1f}"/>'
        up = f'<path class="grid" d="M{middle:.1f} {TOP:.1f}V{below:.1f}"/>'
        return up + line + "".join(parts) + _text(middle, TOP - 24, HINT, "note")
    for share in (0.25, 0.5, 0.75):
        for i in range(3):
            ends = ([share, 1 - share, 0.0], [share, 0.0, 1 - share])
            (x1, y1), (x2, y2) = (_at(*barycentric(*(end[-i:] + end[:-i]))) for end in ends)
            parts.insert(0, f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')
    parts.append(_text(top[0], top[1] - 26, "popularity", "corner popularity"))
    parts.append(_text(top[0], top[1] - 10, DOES["popularity"], "note"))
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (left, right, top))
    return "".join(parts) + f'<path class="frame" d="M{path}Z"/>'


def _dot(dot: Dot) -> str:
    x, y = _at(dot.x, dot.y)
    name, circle = f"{dot.layer}.{dot.head}", f'cx="{x:.1f}" cy="{y:.1f}" r="{DOT}" fill="{depth_colour(dot.depth)}"'
    return f'<circle class="dot" data-head="{name}" {circle}><title>{escape(dot.title)}</title></circle>'


def radius(position: float, dot: float = DOT, most: float = RING) -> float:
    """A ring whose area beyond the dot is as the share: r² = dot² + share·(most² − dot²).

    >>> radius(0.0), radius(1.0)
    (4.5, 15.0)
    """
    return math.sqrt(dot**2 + position * (most**2 - dot**2))


def _ring(dot: Dot) -> str:
    x, y = _at(dot.x, dot.y)
    return f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="{radius(dot.position):.1f}"/>'


def _arrow(start: Dot, end: Dot) -> str:
    (x1, y1), (x2, y2) = _at(start.x, start.y), _at(end.x, end.y)
    colour, long = depth_colour(end.depth), math.hypot(x2 - x1, y2 - y1)
    dx, dy = ((x2 - x1) / long, (y2 - y1) / long) if long > 0 else (0.0, 0.0)
    bx, by = x2 - 7 * dx, y2 - 7 * dy
    head = f"M{x2:.1f} {y2:.1f}L{bx - 3.2 * dy:.1f} {by + 3.2 * dx:.1f}L{bx + 3.2 * dy:.1f} {by - 3.2 * dx:.1f}Z"
    line = f'<path d="M{x1:.1f} {y1:.1f}L{bx:.1f} {by:.1f}" stroke="{colour}" stroke-width="1.6" fill="none"/>'
    tail = f'<circle cx="{x1:.1f}" cy="{y1:.1f}" r="2" fill="{colour}"/>'
    return f'<g class="arrow">{line}{tail}<path d="{head}" fill="{colour}"/><title>{escape(end.title)}</title></g>'


def _legend(look: Look, found: Sequence[Dot]) -> str:
    """Depth as a bar of one step a layer, sizes of rings where there are any, and what was left out."""
    numbers, y = sorted({layer["layer"] for layer in look.layers}), HEIGHT - 22
    step, parts = 96 / len(numbers), [_text(LEFT - 20, y, f"layer {numbers[0]}", "note", "start")]
    for i in range(len(numbers)):
        colour, x = depth_colour(i / max(len(numbers) - 1, 1)), LEFT + 34 + i * step
        parts.append(f'<rect x="{x:.2f}" y="{y - 10}" width="{step + 0.3:.2f}" height="11" fill="{colour}"/>')
    parts.append(_text(LEFT + 136, y, str(numbers[-1]), "note", "start"))
    missing = len(look.heads) - len(found)
    if any(dot.position > 0 for dot in found):
        x = LEFT + SIDE + 20 - 104
        parts.append(_text(x - 8, y, "position", "note", "end"))
        for share in (0.25, 0.75):
            size = radius(share)
            parts.append(f'<circle class="ring" cx="{x + size:.1f}" cy="{y - 5}" r="{size:.1f}"/>')
            parts.append(_text(x + 2 * size + 4, y, f"{share:.0%}", "note", "start"))
            x += 2 * size + 36
    elif missing:
        parts.append(_text(LEFT + SIDE + 20, y, f"{missing} cross-attention heads left out", "note", "end"))
    return "".join(parts)
