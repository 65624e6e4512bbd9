"""Re-ranked lists and their scores in the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.estimators.rerank.reading import Reranking
from keyquery.instruments.rankings.rankings import RankingScores
from keyquery.report.causes.layout import short
from keyquery.report.kit.tables import columns_table
from keyquery.report.rerank.page import direction, mark

MOST = 5  # queries that are shown
STYLES = {"up": "blue", "down": "yellow", "stays": "dim"}
LETTERS = 50


def reranking_lines(reading: Reranking) -> list[Any]:
    """A table a query: what stands in the first places now, where it was, and how far it moved."""
    shown: list[Any] = [Text(f"{reading.method}: {len(reading.queries)} queries", style="bold")]
    for one in reading.queries[:MOST]:
        made = columns_table("place", "was", Text("moved"), Text("item"), "score")
        items = {item["item"]: item for item in one["items"]}
        for place, number in enumerate(one["after"], 1):
            item = items[number]
            name = str(number) if item["name"] is None else f"{number}: {item['name']}"
            cells = [str(place), "below" if item["before"] is None else str(item["before"])]
            right = " ✓" if item["relevant"] else ""
            score = "" if item["score"] is None else f"{item['score']:.4f}"
            made.add_row(
                *cells, Text(mark(item), style=STYLES[direction(item)]), Text(short(name, LETTERS) + right), score
            )
        told = one["precision"]
        known = told is not None and told["before"] is not None
        said = f", average precision {told['before']:.3f} → {told['after']:.3f}" if known else ""
        shown += ["", Text(f"{short(one['name'] or 'query ' + str(one['query']), LETTERS)}{said}"), made]
    rest = len(reading.queries) - MOST
    return shown + ([f"and {rest} more queries: --json, --csv or --html for all"] if rest > 0 else [])


def scores_lines(reading: RankingScores) -> list[Any]:
    """The mean of every measure."""
    made = columns_table("measure", "mean")
    for name, value in reading.mean.items():
        made.add_row(name, f"{value:.4f}")
    skipped = len(reading.rows) - len(reading.scored)
    said = f"{len(reading.scored)} queries" + (f", {skipped} without a relevant item left out" if skipped else "")
    return [Text(said, style="bold"), made]
