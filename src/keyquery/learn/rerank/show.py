"""Re-ranked lists in the terminal, as a figure and as a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from keyquery.learn.rerank.reading import Reranking, moved
from keyquery.pages.colours import LIGHT
from keyquery.pages.components import versioned
from keyquery.pages.document import document
from keyquery.pages.rings import short
from keyquery.pages.tables import Text, columns_table
from keyquery.support.checks import check_count
from keyquery.support.extras import optional
from keyquery.support.printable import counted

PAGE = 50  # queries of a page
QUERIES = 5  # queries that are shown
STYLES = {"up": "blue", "down": "yellow", "stays": "dim"}
LONGEST = 50


def lines(reading: Reranking) -> list[Any]:
    """A table per query: the items at the top, their former ranks, and the change."""
    shown: list[Any] = [Text(f"{reading.method}: {len(reading.queries)} queries", style="bold")]
    for query in reading.queries[:QUERIES]:
        table = columns_table("rank", "was", Text("moved"), Text("item"), "score")
        items = {item["item"]: item for item in query["items"]}
        for place, number in enumerate(query["after"], 1):
            item = items[number]
            name = str(number) if item["name"] is None else f"{number}: {item['name']}"
            cells = [str(place), "below" if item["before"] is None else str(item["before"])]
            right = " ✓" if item["relevant"] else ""
            score = "" if item["score"] is None else f"{item['score']:.4f}"
            table.add_row(
                *cells, Text(mark(item), style=STYLES[direction(item)]), Text(short(name, LONGEST) + right), score
            )
        scores = _precision(query)
        name = short(query["name"] or f"query {query['query']}", LONGEST)
        shown += ["", Text(f"{name}, {scores}" if scores else name), table]
    rest = len(reading.queries) - QUERIES
    return shown + ([f"{rest} more queries not shown: use --json, --csv or --html for all"] if rest > 0 else [])


def _precision(query: Mapping[str, Any]) -> str:
    """The average precision before and after, if it is known."""
    precision = query["precision"]
    if precision is None or precision["before"] is None:
        return ""
    return f"average precision {precision['before']:.3f} → {precision['after']:.3f}"


def direction(item: Mapping[str, Any]) -> str:
    """Whether an item moved "up" or "down" or "stays"; items from below the list moved up."""
    by = moved(item)
    if by is None:
        return "up" if item["before"] is None else "down"
    return "stays" if by == 0 else "up" if by > 0 else "down"


def mark(item: Mapping[str, Any]) -> str:
    """The change in rank: ▲3, ▼2, or nothing."""
    by = moved(item)
    sign = {"up": "▲", "down": "▼", "stays": ""}[direction(item)]
    return sign if by is None or by == 0 else f"{sign}{abs(by)}"


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
    axis.set_title(
        ": ".join(filter(None, [short(chosen["name"] or f"query {query}", LETTERS), _precision(chosen)])), loc="left"
    )
    return figure


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


FIGURES = {"moves": moves}


def page(reading: Reranking) -> str:
    """Each query's list before and after, joined by lines, with rank changes marked."""
    known = any(item["relevant"] is not None for query in reading.queries for item in query["items"])
    legend = [{"value": "▲", "name": "moved up", "tone": "var(--symmetric)"}]
    legend += [{"value": "▼", "name": "moved down", "tone": "var(--skew)"}]
    legend += [{"value": "", "name": "relevant", "tone": "var(--gain)"}] if known else []
    count = len(reading.queries)
    note = f"The first {PAGE} of {count} queries; the JSON has all." if count > PAGE else ""
    pictures = {number: data for key, data in reading.thumbnails.items() if (number := key.partition("item ")[2])}
    queries = [_query(reading, query) for query in reading.queries[:PAGE]]
    blocks = [
        {"type": "summary", "sentences": [_sentence(reading)], "tags": legend, "note": note},
        {"type": "ranking", "most": reading.most, "queries": queries, "pictures": pictures},
    ]
    facts, notes = _facts(reading), versioned([], reading.provenance)
    return document(reading.method, "re-ranking", [{"blocks": blocks}], facts, notes, images=True)


def _sentence(reading: Reranking) -> str:
    """The change of the mean average precision if it is known, else the number of ranks that changed."""
    rows = [query["precision"] for query in reading.queries if query["precision"]]
    rows = [row for row in rows if row["before"] is not None]
    if not rows:
        return f"{reading.moved} of {len(reading.queries) * reading.most} ranks changed."
    before, after = (sum(row[side] for row in rows) / len(rows) for side in ("before", "after"))
    return f"Mean average precision goes from {before:.3f} to {after:.3f} ({counted(len(rows), 'query', 'queries')})."


def _facts(reading: Reranking) -> str:
    count = len(reading.queries)
    facts = [f"{count} quer{'ies' if count > 1 else 'y'}", f"top {reading.top} re-ranked"]
    facts += [f"first {reading.most} shown", f"{reading.moved} of {count * reading.most} ranks changed"]
    return " · ".join(facts)


def _query(reading: Reranking, query: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": f"Query {query['query']}" if query["name"] is None else query["name"],
        "note": _precision(query),
        "picture": reading.thumbnails.get(f"query {query['query']}"),
        "before": list(query["before"]),
        "after": list(query["after"]),
        "items": [_card(item) for item in query["items"]],
    }


def _card(item: Mapping[str, Any]) -> dict[str, Any]:
    name = f"item {item['item']}" if item["name"] is None else item["name"]
    score = "" if item["score"] is None else f", score {item['score']:.4f}"
    title = {}
    for side, other in (("before", "after"), ("after", "before")):
        place = f"rank {item[other]} {other}" if item[other] else "below the list"
        title[side] = f"{name}: {place}{score}"
    card = {"item": item["item"], "name": name, "before": item["before"], "after": item["after"], "title": title}
    kind = {None: "", True: "right", False: "wrong"}[item["relevant"]]
    return {**card, "went": direction(item), "mark": mark(item), "kind": kind}
