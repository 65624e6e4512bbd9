"""Re-ranked lists as a self-contained HTML page: before and after, joined by lines, with rank changes marked."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from keyquery.estimators.rerank.reading import Reranking, moved
from keyquery.pages.document import document

MOST = 50  # queries that are shown
CARD, GAP, TALL = 84, 8, 46  # pixels: width of a card, gap between cards, height of the lines


def moves_page(reading: Reranking) -> str:
    """The page; it needs no script."""
    return document(
        "moves",
        reading.method,
        images=True,
        facts=escape(_facts(reading)),
        legend=_legend(reading),
        queries="".join(_query(reading, query) for query in reading.queries[:MOST]),
        rest=_rest(reading),
    )


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


def _facts(reading: Reranking) -> str:
    count = len(reading.queries)
    facts = [f"{count} quer{'ies' if count > 1 else 'y'}", f"top {reading.top} re-ranked"]
    facts += [f"first {reading.most} shown", f"{reading.moved} of {count * reading.most} ranks changed"]
    return " · ".join(facts)


def _legend(reading: Reranking) -> str:
    keys = ['<span class="up">▲ moved up</span>', '<span class="down">▼ moved down</span>']
    if any(item["relevant"] is not None for query in reading.queries for item in query["items"]):
        keys += ['<span class="key"><i class="right"></i>relevant</span>', '<span class="key"><i></i>not</span>']
    return " ".join(keys)


def _query(reading: Reranking, query: Mapping[str, Any]) -> str:
    items = {item["item"]: item for item in query["items"]}
    name = f"Query {query['query']}" if query["name"] is None else query["name"]
    strips = [
        f'<ol class="strip {side}">{"".join(_card(reading, items[item], side) for item in query[side])}</ol>'
        for side in ("before", "after")
    ]
    before, after = (f'<p class="side">{side}</p>' for side in ("before", "after"))
    drawn = f'<div class="lists">{before}{strips[0]}{_lines(reading, items)}{strips[1]}{after}</div>'
    image = _image(reading, f"query {query['query']}")
    heading = f"{image}<div><h2>{escape(name)}</h2>{_precision(query)}</div>"
    return f'<section class="query"><div class="asked">{heading}</div><div class="wide">{drawn}</div></section>'


def _precision(query: Mapping[str, Any]) -> str:
    precision = query["precision"]
    if precision is None or precision["before"] is None:
        return ""
    return f'<p class="muted">average precision {precision["before"]:.3f} → <b>{precision["after"]:.3f}</b></p>'


def _card(reading: Reranking, item: Mapping[str, Any], side: str) -> str:
    kind = {None: "", True: " right", False: " wrong"}[item["relevant"]]
    went = f" {direction(item)}" if direction(item) != "stays" else ""
    name = f"item {item['item']}" if item["name"] is None else item["name"]
    shown = _image(reading, f"item {item['item']}") or f'<span class="name">{escape(name)}</span>'
    other = item["after" if side == "before" else "before"]
    place = f"rank {other} {'after' if side == 'before' else 'before'}" if other else "below the list"
    title = f"{name}: {place}" + ("" if item["score"] is None else f", score {item['score']:.4f}")
    change = mark(item) if side == "after" else ""
    return (
        f'<li class="card{kind}{went}" title="{escape(title)}">{shown}'
        f'<span class="place"><b>{item[side]}</b> <span class="mark">{change}</span></span></li>'
    )


def _lines(reading: Reranking, items: Mapping[int, Mapping[str, Any]]) -> str:
    """Lines from each rank before to the rank after; items from lower ranks come from the right edge."""
    width = reading.most * (CARD + GAP)
    parts = []
    for item in items.values():
        ends = [_middle(item[side], reading.most, width) for side in ("before", "after")]
        parts.append(f'<line class="{direction(item)}" x1="{ends[0]}" y1="0" x2="{ends[1]}" y2="{TALL}"/>')
    size = f'viewBox="0 0 {width} {TALL}" width="{width}" height="{TALL}"'
    return f'<svg class="slopes" {size} aria-hidden="true">{"".join(parts)}</svg>'


def _middle(place: int | None, most: int, width: int) -> int:
    return width + 6 if place is None or place > most else (place - 1) * (CARD + GAP) + CARD // 2


def _image(reading: Reranking, key: str) -> str:
    data = reading.thumbnails.get(key)
    return "" if data is None else f'<img src="data:image/png;base64,{escape(data)}" alt="{escape(key)}">'


def _rest(reading: Reranking) -> str:
    count = len(reading.queries)
    return f"The first {MOST} of {count} queries; the JSON has all." if count > MOST else ""
