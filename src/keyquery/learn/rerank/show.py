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
QUERIES = 5  # queries that are shown in the terminal
LONGEST, LETTERS = 50, 30  # characters of a name that are shown in the terminal, and in a figure
STYLES = {"up": "blue", "down": "yellow", "stays": "dim"}
COLOURS = {"up": LIGHT["symmetric"], "down": LIGHT["skew"], "stays": "#8c959f"}
INK, RELEVANT = "#24292f", "#1a7f37"
SIDES = ("before", "after")


def lines(reading: Reranking) -> list[Any]:
    """A table per query: the items at the top, their former ranks, and the change."""
    shown: list[Any] = [Text(f"{reading.method}: {len(reading.queries)} queries", style="bold")]
    for query in reading.queries[:QUERIES]:
        table = columns_table("rank", "was", Text("moved"), Text("item"), "score")
        items = {item["item"]: item for item in query["items"]}
        for item in (items[number] for number in query["after"]):
            name = short(str(item["item"]) if item["name"] is None else f"{item['item']}: {item['name']}", LONGEST)
            table.add_row(
                str(item["after"]),
                "below" if item["before"] is None else str(item["before"]),
                Text(mark(item), style=STYLES[direction(item)]),
                Text(name + (" ✓" if item["relevant"] else "")),
                "" if item["score"] is None else f"{item['score']:.4f}",
            )
        name = short(query["name"] or f"query {query['query']}", LONGEST)
        shown += ["", Text(", ".join(filter(None, [name, _precision(query)]))), table]
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
    before, after = (float("inf") if item[side] is None else item[side] for side in SIDES)
    return "stays" if before == after else "up" if after < before else "down"


def mark(item: Mapping[str, Any]) -> str:
    """The change in rank: ▲3, ▼2, or nothing."""
    sign = {"up": "▲", "down": "▼", "stays": ""}[direction(item)]
    return f"{sign}{abs(change)}" if (change := moved(item)) else sign


def moves(reading: Reranking, pyplot: Any, query: int = 0) -> Any:
    """The top of one query's list before and after; items known to be relevant are bold and green."""
    check_count("query", query, least=0, most=len(reading.queries) - 1)
    chosen, most, lower = reading.queries[query], reading.most, False
    height = 0.8 + (0.42 if reading.thumbnails else 0.24) * most
    figure, axis = pyplot.subplots(figsize=(6.4, height), layout="constrained")
    for item in chosen["items"]:
        ends = [rank if (rank := item[side]) is not None and rank <= most else None for side in SIDES]
        lower |= None in ends
        went = direction(item)
        look = {"color": COLOURS[went], "linewidth": 0.8 if went == "stays" else 1.3, "clip_on": False}
        axis.plot([0.05, 0.95], [most + 0.7 if end is None else end for end in ends], solid_capstyle="round", **look)
        for x, end in enumerate(ends):
            if end is not None:
                _label(axis, reading, item, x, end)
    axis.set(xlim=(-1.1, 2.1), ylim=(most + 1.1, 0.0))
    axis.axis("off")
    for x, side in enumerate(SIDES):
        axis.text(x, 0.3, side, ha="center", weight="bold")
        if lower:
            axis.text(x, most + 0.85, "lower ranks", ha="center", va="top", size=6.5, color=COLOURS["stays"])
    name = short(chosen["name"] or f"query {query}", LETTERS)
    axis.set_title(": ".join(filter(None, [name, _precision(chosen)])), loc="left")
    return figure


def _label(axis: Any, reading: Reranking, item: Mapping[str, Any], side: int, rank: int) -> None:
    """The name and the image of an item, left of its line before (side 0) and right of it after (1)."""
    outwards, image = (-1, 1)[side], reading.thumbnails.get(f"item {item['item']}")
    x = side + outwards * 0.05
    if image is not None:
        _image(axis, image, (x + outwards * 0.07, rank))
        x += outwards * 0.16
    name = f"item {item['item']}" if item["name"] is None else short(item["name"], LETTERS)
    look = {"color": RELEVANT, "weight": "bold"} if item["relevant"] else {"color": INK}
    text = axis.text(x, rank, name, ha=("right", "left")[side], va="center", **look)
    if side and mark(item):
        options: dict[str, Any] = {"xycoords": text, "textcoords": "offset points", "va": "center", "size": 6.5}
        axis.annotate(mark(item), (1, 0.5), (4, 0), color=COLOURS[direction(item)], **options)


def _image(axis: Any, data: str, position: tuple[float, float]) -> None:
    boxes = optional("matplotlib.offsetbox", "plot")
    pixels = optional("matplotlib.image", "plot").imread(io.BytesIO(base64.b64decode(data)), format="png")
    zoom = 20 / max(pixels.shape[:2])
    shown = boxes.OffsetImage(pixels, zoom=zoom, cmap="gray", interpolation="nearest")
    axis.add_artist(boxes.AnnotationBbox(shown, position, frameon=False))


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
    ranks = f"{reading.moved} of {count * reading.most} ranks changed"
    blocks = [
        {"type": "summary", "sentences": [_sentence(reading, ranks)], "tags": legend, "note": note},
        {"type": "ranking", "most": reading.most, "queries": queries, "pictures": pictures},
    ]
    facts = [counted(count, "query", "queries"), f"top {reading.top} re-ranked", f"first {reading.most} shown", ranks]
    notes = versioned([], reading.provenance)
    return document(reading.method, "re-ranking", [{"blocks": blocks}], " · ".join(facts), notes, images=True)


def _sentence(reading: Reranking, ranks: str) -> str:
    """The change of the mean average precision if it is known, else the number of ranks that changed."""
    rows = [query["precision"] for query in reading.queries if _precision(query)]
    if not rows:
        return f"{ranks}."
    before, after = (sum(row[side] for row in rows) / len(rows) for side in SIDES)
    return f"Mean average precision goes from {before:.3f} to {after:.3f} ({counted(len(rows), 'query', 'queries')})."


def _query(reading: Reranking, query: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": f"Query {query['query']}" if query["name"] is None else query["name"],
        "note": _precision(query),
        "picture": reading.thumbnails.get(f"query {query['query']}"),
        **{side: list(query[side]) for side in SIDES},
        "items": [_card(item) for item in query["items"]],
    }


def _card(item: Mapping[str, Any]) -> dict[str, Any]:
    name = f"item {item['item']}" if item["name"] is None else item["name"]
    score = "" if item["score"] is None else f", score {item['score']:.4f}"
    title = {}
    for side, other in (SIDES, SIDES[::-1]):
        rank = f"rank {item[other]} {other}" if item[other] else "below the list"
        title[side] = f"{name}: {rank}{score}"
    card = {"item": item["item"], "name": name, "before": item["before"], "after": item["after"], "title": title}
    kind = {None: "", True: "right", False: "wrong"}[item["relevant"]]
    return {**card, "went": direction(item), "mark": mark(item), "kind": kind}
