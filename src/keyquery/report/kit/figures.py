"""A Reading as a matplotlib figure, or as a picture file."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyquery.estimators import Importance, Interactions, Leaning, Reranking
from keyquery.extras import optional
from keyquery.forms.checks import check_choice
from keyquery.instruments import Ablation, Causes, Comparison, Depth, Flow, Look, Transport
from keyquery.layers.time import TimeKernel
from keyquery.printable import printable_copy
from keyquery.reading import Reading
from keyquery.report.between import between
from keyquery.report.carried import carried
from keyquery.report.changed import changed
from keyquery.report.colours import LIGHT, PLAIN, depth_colour
from keyquery.report.curves import curves
from keyquery.report.depths import depths_figure
from keyquery.report.dials import PICTURES
from keyquery.report.flow_map import flow_map
from keyquery.report.gains import gains
from keyquery.report.graph_figure import graph_figure
from keyquery.report.graphs import svg as graphs_svg
from keyquery.report.interactions import interactions
from keyquery.report.lags import lags
from keyquery.report.leaning import leaning
from keyquery.report.maps import ablation_map
from keyquery.report.moves import moves
from keyquery.report.panels import panels
from keyquery.report.plane import plane
from keyquery.report.ranks import ranks
from keyquery.report.seen import seen
from keyquery.report.shares import has_data
from keyquery.report.starts import starts
from keyquery.report.stretches import stretches
from keyquery.report.triangle import CORNERS, HINT, LEGEND, about, barycentric, check_joined, dots, strength, svg
from keyquery.report.ways import ways
from keyquery.report.worth import worth
from keyquery.studies import (
    Abilities,
    CausesStudy,
    DatapointStudy,
    DepthStudy,
    Kernels,
    Objectives,
    PrimalStudy,
    RerankStudy,
    TimeStudy,
    TransportStudy,
    VisionLanguageStudy,
    WordsStudy,
)

KINDS = (".pdf", ".png", ".svg")
# Fit for a column of a paper: small type, thin lines, and letters that stay letters in a PDF.
PAPER: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
    "text.parse_math": False,  # a dollar in a name is a dollar
}
PAPER |= {"svg.hashsalt": "keyquery"}  # the same figures give the same file


# Kinds that have pictures of their own, by name; the first is the one that is meant.
OWN: dict[type[Reading], Mapping[str, Callable[..., Any]]] = {
    Objectives: {"curves": curves},
    Kernels: {"panels": panels},
    Abilities: PICTURES,
    PrimalStudy: {"worth": worth},
    TimeStudy: {"gains": gains},
    CausesStudy: {"changed": changed},
    RerankStudy: {"ranks": ranks},
    DatapointStudy: {"between": between},
    TransportStudy: {"carried": carried},
    VisionLanguageStudy: {"seen": seen},
    Ablation: {"map": ablation_map},
    Causes: {"graphs": graph_figure},
    Flow: {"map": flow_map},
    Transport: {"ways": ways},
    DepthStudy: {"depths": depths_figure},
    WordsStudy: {"starts": starts},
    Depth: {"plane": plane},
    Importance: {"stretches": stretches},
    TimeKernel: {"lags": lags},
    Interactions: {"interactions": interactions},
    Leaning: {"leaning": leaning},
    Reranking: {"moves": moves},
}


def plot(reading: Reading, what: str | None = None, **options: Any) -> Any:
    """The picture of a look or a comparison: "triangle", the default on data, or "map", of symmetry in depth.

    Other kinds have their own, such as a study's curves; that of the dial has "parts" and "layers".
    """
    pyplot = optional("matplotlib.pyplot", "plot")
    reading = printable_copy(reading)
    if type(reading) in OWN:
        drawers = OWN[type(reading)]
        what = what or next(iter(drawers))
        check_choice("what", what, tuple(drawers))
        with _paper(pyplot):
            return drawers[what](reading, pyplot, **options)
    looks = looks_of(reading)
    what = what or ("triangle" if any(map(has_data, looks)) else "map")
    check_choice("what", what, ("triangle", "map"))
    with _paper(pyplot):
        return (_triangles if what == "triangle" else _maps)(looks, pyplot, **options)


@contextmanager
def _paper(pyplot: Any) -> Iterator[None]:
    """The settings of print, for one figure.

    A notebook's backend comes with the first figure and turns interaction on, without which no later figure is shown:
    that is not to be undone with the settings.
    """
    with pyplot.rc_context(PAPER):
        try:
            yield
        finally:
            interactive = pyplot.isinteractive()
    optional("matplotlib", "plot").interactive(interactive)


def looks_of(reading: Reading) -> list[Look]:
    """The looks that a reading holds; one that holds none has no picture."""
    if isinstance(reading, Look):
        return [reading]
    if isinstance(reading, Comparison):
        return reading.looks
    raise ValueError(f"a reading of kind {reading.kind!r} has no picture")


def check_picture(path: Path) -> None:
    """Refuse a name whose ending is no kind of picture.

    >>> check_picture(Path("heads.gif"))
    Traceback (most recent call last):
    ValueError: heads.gif: a picture is .pdf, .png or .svg
    """
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"{path}: a picture is {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def picture_bytes(path: Path, reading: Reading, joined: bool = False, what: str | None = None, **options: Any) -> bytes:
    """The triangle, or the kind's own picture with its `options`, as `path` names it: .svg, .png or .pdf.

    The triangle and causal graphs as .svg need no other package; the rest is drawn by matplotlib.
    """
    check_picture(path)
    reading = printable_copy(reading)  # no control character is well-formed XML
    if isinstance(reading, Causes) and path.suffix.lower() == ".svg":
        return graphs_svg(reading).encode()
    own = type(reading) in OWN
    if path.suffix.lower() == ".svg" and not own:
        return svg(*looks_of(reading), joined=joined).encode()
    figure = plot(reading, what, **options) if own else plot(reading, "triangle", joined=joined)
    data = io.BytesIO()
    with optional("matplotlib", "plot").rc_context(PAPER):
        kind = path.suffix.lower()[1:]
        figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else None)
    optional("matplotlib.pyplot", "plot").close(figure)
    return data.getvalue()


def _triangles(looks: list[Look], pyplot: Any, title: str | None = None, joined: bool = False) -> Any:
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
    """A bubble per head, filled by how much of its variance the triangle shows, and its 95 % region."""
    found = dots(look)
    xs, ys = [dot.x for dot in found], [dot.y for dot in found]
    colours = [depth_colour(dot.depth) for dot in found]
    for dot in found:
        if dot.region:
            axis.fill(*zip(*dot.region, strict=True), color=depth_colour(dot.depth), alpha=0.13, lw=0.3, zorder=2)
    axis.scatter(xs, ys, s=[40 * dot.filled for dot in found], c=colours, linewidths=0, zorder=3)
    rims = [f"{depth_colour(dot.depth)}{round(255 * strength(dot)):02x}" for dot in found]
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


def _maps(looks: list[Look], pyplot: Any, title: str | None = None) -> Any:
    """Symmetry of the weights (raw), layers by heads."""
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
