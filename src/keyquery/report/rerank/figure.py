"""A re-ranked list as a figure: ranks before on the left, after on the right, joined by lines."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from keyquery.estimators.rerank.reading import Reranking
from keyquery.pages.colours import LIGHT
from keyquery.report.causes.layout import short
from keyquery.report.rerank.page import direction, mark
from keyquery.support.checks import check_count
from keyquery.support.extras import optional

COLOURS = {"up": LIGHT["symmetric"], "down": LIGHT["skew"], "stays": "#8c959f"}
FOUND = "#1a7f37"
LETTERS = 30  # characters of a name that are shown


def moves(reading: Reranking, pyplot: Any, query: int = 0) -> Any:
    """The top of one query's list before and after; items known to be relevant are bold and green."""
    check_count("query", query, least=0, most=len(reading.queries) - 1)
    chosen = reading.queries[query]
    items = {item["item"]: item for item in chosen["items"]}
    tall = 0.42 if reading.thumbnails else 0.24
    figure, axis = pyplot.subplots(figsize=(6.4, 0.8 + tall * reading.most), layout="constrained")
    for item in items.values():
        _line(axis, item, reading.most)
    for side, x, aside in (("before", 0.0, "right"), ("after", 1.0, "left")):
        for place, number in enumerate(chosen[side], 1):
            _label(axis, reading, items[number], (x, place), aside)
    axis.set(xlim=(-1.1, 2.1), ylim=(reading.most + 1.1, 0.0))
    axis.axis("off")
    below = any(None in places or max(places) > reading.most for places in map(_places, items.values()))
    for side, x in (("before", 0.0), ("after", 1.0)):
        axis.text(x, 0.3, side, ha="center", weight="bold")
        if below:
            axis.text(x, reading.most + 0.85, "lower ranks", ha="center", va="top", size=6.5, color=COLOURS["stays"])
    axis.set_title(_title(chosen), loc="left")
    return figure


def _title(query: Mapping[str, Any]) -> str:
    name = short(query["name"] or f"query {query['query']}", LETTERS)
    precision = query["precision"]
    if precision is None or precision["before"] is None:
        return name
    return f"{name}: average precision {precision['before']:.3f} → {precision['after']:.3f}"


def _places(item: Mapping[str, Any]) -> tuple[Any, Any]:
    return item["before"], item["after"]


def _line(axis: Any, item: Mapping[str, Any], most: int) -> None:
    ends = [most + 0.7 if place is None or place > most else place for place in _places(item)]
    went = direction(item)
    look = {"color": COLOURS[went], "linewidth": 0.8 if went == "stays" else 1.3, "clip_on": False}
    axis.plot([0.05, 0.95], ends, solid_capstyle="round", **look)


def _label(axis: Any, reading: Reranking, item: Mapping[str, Any], at: tuple[float, float], aside: str) -> None:
    right = item["relevant"] is True
    look: dict[str, Any] = {"color": FOUND if right else "#24292f", "weight": "bold" if right else "normal"}
    sign, image = (-1 if aside == "right" else 1), reading.thumbnails.get(f"item {item['item']}")
    x = at[0] + sign * 0.05
    if image is not None:
        _image(axis, image, (x + sign * 0.07, at[1]))
        x += sign * 0.16
    name = f"item {item['item']}" if item["name"] is None else short(item["name"], LETTERS)
    text = axis.text(x, at[1], name, ha=aside, va="center", **look)
    if aside == "left" and mark(item):
        axis.annotate(
            mark(item),
            (1, 0.5),
            (4, 0),
            xycoords=text,
            textcoords="offset points",
            va="center",
            size=6.5,
            color=COLOURS[direction(item)],
        )


def _image(axis: Any, data: str, at: tuple[float, float]) -> None:
    boxes = optional("matplotlib.offsetbox", "plot")
    pixels = optional("matplotlib.image", "plot").imread(io.BytesIO(base64.b64decode(data)), format="png")
    zoom = 20 / max(pixels.shape[:2])
    shown = boxes.OffsetImage(pixels, zoom=zoom, cmap="gray", interpolation="nearest")
    axis.add_artist(boxes.AnnotationBbox(shown, at, frameon=False))
