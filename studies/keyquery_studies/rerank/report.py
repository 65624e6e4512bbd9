"""The study of re-ranking as tables in the terminal."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from rich.text import Text

from keyquery.report.kit.tables import columns_table
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.rerank.figure import CALLED, size_of, title_of
from keyquery_studies.rerank.study import PLACE, RerankStudy

NOTES = (
    "mAP: standard average precision of whole lists; gain: less that of the first round of the same seed.",
    "top: the first of each list put in order; whole: the database ranked anew. ms: a query, with its graph known.",
)
REVISITED = "medium and hard: trapezoidal average precision, as in the revisited Oxford protocol."


def tables(reading: RerankStudy) -> list[Any]:
    """One table a set and a size of lists and networks."""
    rows, shown = reading.summary(), list[Any]()
    revisited = any(row["medium"] is not None for row in rows)
    for place in dict.fromkeys(map(itemgetter(*PLACE), rows)):
        found = [row for row in rows if itemgetter(*PLACE)(row) == place]
        own = found[0]["medium"] is not None
        names = ("medium", "hard") if own else ("average_precision", "gain", "ndcg@10")
        heads = {"average_precision": "mAP", "ndcg@10": "nDCG@10"}
        made = columns_table("method", "scope", *(heads.get(name, name) for name in names), "ms")
        for column in made.columns[:2]:
            column.justify, column.no_wrap = "left", True
        for row in found:
            cells = ["" if name == "gain" and row["scope"] is None else _spread(row, name) for name in names]
            cells.append("" if row["ms"] is None else f"{row['ms']:.2f}")
            made.add_row(CALLED.get(row["method"], row["method"]), row["scope"] or "", *cells)
        said = f"{title_of(found[0]['dataset'])}, {size_of(found[0])}: mean of {seeds_of(found)}"
        shown += [*([""] if shown else []), Text(said, style="bold"), made]
    return [*shown, *NOTES, *([REVISITED] if revisited else [])]


def _spread(row: dict[str, Any], name: str) -> str:
    spread = row[f"{name}_sd"]
    sign = "+" if name == "gain" else ""
    return f"{row[name]:{sign}.3f}" + ("" if spread is None else f" ± {spread:.3f}")
