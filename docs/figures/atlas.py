"""Draws atlas.svg: heads and layers of every model of the atlas, from the readings that docs/atlas/make.py made."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from statistics import fmean

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.triangle import STYLE, Dot, barycentric, dots, has_data
from keyquery.pages.colours import DARK, LIGHT, depth_colour

HERE = Path(__file__).parent
ROWS = (  # bidirectional models, then causal ones and those that were not run
    ("encoder", "minilm", "rxnfp", "rxnmapper", "antiberty", "dinov2"),
    ("decoder", "smollm2", "iglm", "whisper", "sceptr"),
)
WIDE, HIGH, SIDE, LEFT, TOP = 180.0, 318.0, 140.0, 20.0, 78.0  # of one panel, and of the triangle in it
TALL = SIDE * math.sqrt(3) / 2
BASE, UNIT = 280.0, 76.0  # where symmetry is 0, and how tall 1 would be
OWN = f"""
.atlas text {{ font-size: 11px }} .atlas .title {{ font-size: 14px }} .atlas .corner {{ font-size: 11px }}
.atlas .mean {{ fill: none; stroke: #1f2328; stroke-width: 2 }} .atlas .axis {{ stroke: #8b949e }}
.atlas .up {{ fill: {LIGHT["symmetric"]} }} .atlas .down {{ fill: {LIGHT["skew"]} }}
@media (prefers-color-scheme: dark) {{
  .atlas .mean {{ stroke: #f0f6fc }} .atlas .axis {{ stroke: #6e7681 }}
  .atlas .up {{ fill: {DARK["symmetric"]} }} .atlas .down {{ fill: {DARK["skew"]} }}
}}
"""


def main() -> None:
    """Write the picture beside this file."""
    body = []
    for row, names in enumerate(ROWS):
        for column, name in enumerate(names):
            look = kq.Reading.load(HERE.parent / "atlas" / f"{name}.json.xz")
            assert isinstance(look, Look)
            body.append(f'<g transform="translate({column * WIDE:.0f} {row * HIGH:.0f})">{panel(look)}</g>')
    body.append(f'<g transform="translate({5 * WIDE:.0f} {HIGH:.0f})">{legend()}</g>')
    wide, high = 6 * WIDE, len(ROWS) * HIGH + 6
    style = f"<style>:root {{ color-scheme: light dark }}{STYLE}{OWN}</style>"
    label = "Every head of eleven models between symmetric, skew and popularity; below, symmetry by layer"
    box = f'viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" height="{high:.0f}" role="img" aria-label="{label}"'
    text = f'<svg xmlns="http://www.w3.org/2000/svg" class="triangle atlas" {box}>\n{style}\n' + "\n".join(body)
    Path(__file__).with_suffix(".svg").write_text(text + "\n</svg>\n", encoding="utf-8")


def panel(look: Look) -> str:
    """The name of a model, its heads, and the symmetry of its layers."""
    data = look.provenance["data"]
    on = f"on {data['from']}" if data else "weights alone"
    seen = {bool(layer["causal"]) for layer in look.layers if layer["kind"] == "self"}
    kind = "an encoder and a decoder" if len(seen) == 2 else "causal" if True in seen else "bidirectional"
    title = look.model["name"].removesuffix("-Instruct")
    head = [text(LEFT - 10, 16, title, "title", "start"), text(LEFT - 10, 32, kind, "note", "start")]
    head.append(text(LEFT - 10, 46, on.replace("long_text.txt", "the bundled text"), "note", "start"))
    found = dots(look)
    return "".join([*head, frame(look), *map(dot, found), mean(look), layers(look)])


def frame(look: Look) -> str:
    """The triangle, or without data the line between its lower corners."""
    left, right, top = (at(*corner) for corner in ((0, 0), (1, 0), (0.5, math.sqrt(3) / 2)))
    names = text(left[0] - 10, left[1] + 14, "symmetric", "corner symmetric", "start")
    names += text(right[0] + 10, right[1] + 14, "skew", "corner skew", "end")
    if not has_data(look):
        middle = LEFT + SIDE / 2
        lines = f"M{left[0]:.1f} {left[1]:.1f}H{right[0]:.1f}M{middle:.1f} {TOP:.1f}V{left[1]:.1f}"
        return f'<path class="grid" d="{lines}"/>{names}'
    names += text(top[0], top[1] - 5, "popularity", "corner popularity")
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (left, right, top))
    return f'<path class="frame" d="M{path}Z"/>{names}'


def dot(one: Dot) -> str:
    """A head."""
    x, y = at(one.x, one.y)
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{depth_colour(one.depth)}"'
    return f'<circle class="dot" {place}><title>{escape(one.title)}</title></circle>'


def mean(look: Look) -> str:
    """A ring where the mean shares of all heads stand."""
    shares = [head["on_data"] for head in look.heads if head["on_data"]]
    if not shares:
        return ""
    x, y = at(*barycentric(*(fmean(each[part] for each in shares) for part in PARTS[:3])))
    return f'<circle class="mean" cx="{x:.1f}" cy="{y:.1f}" r="7"><title>mean of all heads</title></circle>'


def layers(look: Look) -> str:
    """One bar per layer: the mean symmetry of its heads, up for symmetric and down for skew."""
    groups: dict[str, list[int]] = {}
    for layer in look.layers:
        kind = "cross" if layer["kind"] == "cross" else "decoder" if layer["causal"] else "encoder"
        groups.setdefault(kind, []).append(layer["layer"])
    room = SIDE - 10 * (len(groups) - 1)
    step = min(room / len(look.layers), 16)
    x = LEFT + (room - step * len(look.layers)) / 2
    parts = [f'<path class="axis" d="M{LEFT - 10:.1f} {BASE}H{LEFT + SIDE + 10:.1f}"/>']
    for kind, numbers in groups.items():
        if len(groups) > 1:
            parts.append(text(x + step * len(numbers) / 2, BASE + 26, kind, "note"))
        for number in numbers:
            value = fmean(head["raw"]["symmetry"] for head in look.heads if head["layer"] == number)
            parts.append(bar(x, step, value, f"layer {number}: symmetry {value:+.2f}"))
            x += step
        x += 10
    return "".join(parts)


def bar(x: float, step: float, value: float, title: str) -> str:
    """One of them."""
    tall = abs(value) * UNIT
    box = (
        f'x="{x + step * 0.08:.1f}" y="{BASE - max(value, 0) * UNIT:.1f}" width="{step * 0.84:.1f}" height="{tall:.1f}"'
    )
    return f'<rect class="{"up" if value > 0 else "down"}" {box}><title>{title}</title></rect>'


def legend() -> str:
    """What is to be seen."""
    lines = ("One dot is one head;", "light: first layer, dark: last.", "Ring: mean of the heads.", "")
    lines += ("Not run on data, heads stand", "by their symmetry, a line a", "layer, the first on top.", "")
    lines += ("Bars: symmetry of each layer,", "mean over its heads, first", "layer on the left.")
    parts = [text(LEFT - 10, 32 + 16 * i, line, "note", "start") for i, line in enumerate(lines)]
    for value, said in ((0.5, "+0.5; symmetric is +1"), (0, "0 as at random")):
        y = BASE - value * UNIT
        parts.append(
            f'<path class="axis" d="M{LEFT - 10:.1f} {y:.1f}h14"/>' + text(LEFT + 10, y + 4, said, "note", "start")
        )
    return "".join(parts)


def at(x: float, y: float) -> tuple[float, float]:
    """Sides of the triangle, upwards, to places in the panel."""
    return LEFT + SIDE * x, TOP + TALL - SIDE * y


def text(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
