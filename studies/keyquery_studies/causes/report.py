"""The study of causes as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery.support.statistics import Interval
from keyquery_studies.causes.figure import CALLED, FOUND, TITLES, changed
from keyquery_studies.causes.searches import BEST, ORDERS, SEARCHES
from keyquery_studies.causes.study import CausesStudy
from keyquery_studies.kernels.report import seeds_of

COLUMNS = ("changed", "tokens", "calls", "saves tokens", "saves calls")


def lines(reading: CausesStudy) -> list[Any]:
    """Two tables an application, one a search: every order of tokens; and what comes in place of a recommendation."""
    rows, shown = reading.summary(), list[Any]()
    for name in dict.fromkeys(row["application"] for row in rows):
        models = [model for model in reading.models if model["application"] == name]
        shown.append(Text(f"{TITLES[name]}: {_models(models)}", style="bold"))
        for search in SEARCHES:
            search_rows = [row for row in rows if (row["application"], row["search"]) == (name, search)]
            table = columns_table(FOUND[search], *COLUMNS)
            table.columns[0].no_wrap = True
            for row in search_rows:
                table.add_row(*_cells(row))
            shown.append(table)
            if models[0]["among_ten"] is not None:
                shown.append(_replacements(search_rows))
            shown.append("")
    return [*shown[:-1], *_legend(reading)]


def _replacements(rows: list[dict[str, Any]]) -> str:
    """How specific a change is: the rank of the new recommendation, and how much of the list stays."""
    lines = []
    for row in (row for row in rows if row["kept"] is not None):
        place = f"{row['rank']}." if row["rank"] <= BEST else f"below {BEST}"
        lines.append(f"{CALLED[row['order']]} {place}, {BEST * row['kept']:.1f}")
    return f"previous rank of the new item (median), and how many of the best {BEST} stay: {'; '.join(lines)}"


def _models(models: list[Any]) -> str:
    """Accuracy of the models."""
    wide = models[0]["among_ten"] is not None
    shares = [model["among_ten" if wide else "accuracy"] for model in models]
    among = " among the ten recommended" if wide else ""
    least, most = f"{min(shares):.1%}", f"{max(shares):.1%}"
    span = least if least == most else f"{least} to {most}"
    count = {"seeds": len(models)}
    return f"{span} correct{among}, by frequency alone {models[0]['popular']:.1%}; {seeds_of([count])}"


def _cells(row: dict[str, Any]) -> list[str]:
    ours = row["order"] == ORDERS[0]
    saved = ["", ""] if ours else [_mean(row["shorter"], 2), _mean(row["fewer"], 0)]
    return [CALLED[row["order"]], f"{row['found'].change:.0%}", _mean(row["size"], 2), _mean(row["calls"], 0), *saved]


def _mean(interval: Interval | None, digits: int) -> str:
    if interval is None:
        return "–"
    half = (interval[2] - interval[1]) / 2
    return f"{interval[0]:.{digits}f} ± {half:.{digits}f}"


def _legend(reading: CausesStudy) -> list[str]:
    limits = reading.provenance
    return [
        f"changed: share of predictions; for sets, of up to {limits['largest']} tokens within "
        f"{limits['calls']} model queries. ± is half of a 95 % interval.",
        "saves: by how much the causal graph needs fewer, paired by prediction, where both changed it.",
    ]


FIGURES = {"changed": changed}
