"""Re-ranked lists and their scores in the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.estimators.rerank.reading import Reranking
from keyquery.instruments.rankings.rankings import RankingScores
from keyquery.pages.tables import columns_table
from keyquery.report.causes.layout import short
from keyquery.report.rerank.page import direction, mark

MOST = 5  # queries that are shown
STYLES = {"up": "blue", "down": "yellow", "stays": "dim"}
LETTERS = 50


def reranking_lines(reading: Reranking) -> list[Any]:
    """A table per query: the items at the top, their former ranks, and the change."""
    shown: list[Any] = [Text(f"{reading.method}: {len(reading.queries)} queries", style="bold")]
    for query in reading.queries[:MOST]:
        table = columns_table("rank", "was", Text("moved"), Text("item"), "score")
        items = {item["item"]: item for item in query["items"]}
        for place, number in enumerate(query["after"], 1):
            item = items[number]
            name = str(number) if item["name"] is None else f"{number}: {item['name']}"
            cells = [str(place), "below" if item["before"] is None else str(item["before"])]
            right = " ✓" if item["relevant"] else ""
            score = "" if item["score"] is None else f"{item['score']:.4f}"
            table.add_row(
                *cells, Text(mark(item), style=STYLES[direction(item)]), Text(short(name, LETTERS) + right), score
            )
        precision = query["precision"]
        known = precision is not None and precision["before"] is not None
        scores = f", average precision {precision['before']:.3f} → {precision['after']:.3f}" if known else ""
        shown += ["", Text(f"{short(query['name'] or 'query ' + str(query['query']), LETTERS)}{scores}"), table]
    rest = len(reading.queries) - MOST
    return shown + ([f"{rest} more queries not shown: use --json, --csv or --html for all"] if rest > 0 else [])


def scores_lines(reading: RankingScores) -> list[Any]:
    """The mean of every metric."""
    table = columns_table("metric", "mean")
    for name, value in reading.mean.items():
        table.add_row(name, f"{value:.4f}")
    skipped = len(reading.rows) - len(reading.scored)
    title = f"{len(reading.scored)} queries" + (f", {skipped} without relevant items excluded" if skipped else "")
    return [Text(title, style="bold"), table]
