"""The study of re-ranking as terminal tables."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.rerank.figure import CALLED, ranks, size_of, title_of
from keyquery_studies.rerank.study import PLACE, RerankStudy

NOTES = (
    "mAP: standard average precision of whole lists; gain: over the first-stage ranking of the same seed.",
    "top: the first of each list re-ranked; whole: the database re-ranked. ms: per query, with a precomputed graph.",
)
REVISITED = "medium and hard: trapezoidal average precision, as in the revisited Oxford protocol."


def lines(reading: RerankStudy) -> list[Any]:
    """One table a set and a size of lists and networks."""
    rows, shown = reading.summary(), list[Any]()
    revisited = any(row["medium"] is not None for row in rows)
    for place in dict.fromkeys(map(itemgetter(*PLACE), rows)):
        place_rows = [row for row in rows if itemgetter(*PLACE)(row) == place]
        own = place_rows[0]["medium"] is not None
        names = ("medium", "hard") if own else ("average_precision", "gain", "ndcg@10")
        heads = {"average_precision": "mAP", "ndcg@10": "nDCG@10"}
        table = columns_table("method", "scope", *(heads.get(name, name) for name in names), "ms")
        for column in table.columns[:2]:
            column.justify, column.no_wrap = "left", True
        for row in place_rows:
            cells = ["" if name == "gain" and row["scope"] is None else _spread(row, name) for name in names]
            cells.append("" if row["ms"] is None else f"{row['ms']:.2f}")
            table.add_row(CALLED.get(row["method"], row["method"]), row["scope"] or "", *cells)
        caption = f"{title_of(place_rows[0]['dataset'])}, {size_of(place_rows[0])}: mean of {seeds_of(place_rows)}"
        shown += [*([""] if shown else []), Text(caption, style="bold"), table]
    return [*shown, *NOTES, *([REVISITED] if revisited else [])]


def _spread(row: dict[str, Any], name: str) -> str:
    spread = row[f"{name}_sd"]
    sign = "+" if name == "gain" else ""
    return f"{row[name]:{sign}.3f}" + ("" if spread is None else f" ± {spread:.3f}")


FIGURES = {"ranks": ranks}
