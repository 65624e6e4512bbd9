"""The study of causes as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.report.kit.tables import columns_table
from keyquery.support.statistics import Interval
from keyquery_studies.causes.figure import CALLED, FOUND, TITLES
from keyquery_studies.causes.searches import BEST, ORDERS, SEARCHES
from keyquery_studies.causes.study import CausesStudy
from keyquery_studies.kernels.report import seeds_of

COLUMNS = ("changed", "tokens", "calls", "saves tokens", "saves calls")


def tables(reading: CausesStudy) -> list[Any]:
    """Two tables an application, one a search: every order of tokens; and what comes in place of a recommendation."""
    rows, shown = reading.summary(), list[Any]()
    for name in dict.fromkeys(row["application"] for row in rows):
        models = [model for model in reading.models if model["application"] == name]
        shown.append(Text(f"{TITLES[name]}: {_models(models)}", style="bold"))
        for search in SEARCHES:
            found = [row for row in rows if (row["application"], row["search"]) == (name, search)]
            made = columns_table(FOUND[search], *COLUMNS)
            made.columns[0].no_wrap = True
            for row in found:
                made.add_row(*_cells(row))
            shown.append(made)
            if models[0]["among_ten"] is not None:
                shown.append(_replacements(found))
            shown.append("")
    return [*shown[:-1], *_legend(reading)]


def _replacements(rows: list[dict[str, Any]]) -> str:
    """How specific a change is: what was recommended in place of it, and how much of the list stays."""
    said = []
    for row in (row for row in rows if row["kept"] is not None):
        place = f"{row['rank']}." if row["rank"] <= BEST else f"below {BEST}"
        said.append(f"{CALLED[row['order']]} {place}, {BEST * row['kept']:.1f}")
    return f"place that the new item had (median), and how many of the best {BEST} stay: {'; '.join(said)}"


def _models(models: list[Any]) -> str:
    """How good they are."""
    wide = models[0]["among_ten"] is not None
    shares = [model["among_ten" if wide else "accuracy"] for model in models]
    among = " among the ten recommended" if wide else ""
    least, most = f"{min(shares):.1%}", f"{max(shares):.1%}"
    said = least if least == most else f"{least} to {most}"
    count = {"seeds": len(models)}
    return f"{said} right{among}, by counting alone {models[0]['popular']:.1%}; {seeds_of([count])}"


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
        f"changed: share of predictions; of sets, those of up to {limits['largest']} tokens in up to "
        f"{limits['calls']} calls. ± is half of a 95 % interval.",
        "saves: what the causal graph needs less, prediction by prediction, where both changed it.",
    ]
