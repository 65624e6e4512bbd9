"""The study of causes as tables in the terminal and as a picture: what it takes to change a prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.instruments.intervals import Interval
from keyquery.report.trainings import seeds_of
from keyquery.studies.causes import CausesStudy
from keyquery.studies.explained import BEST, ORDERS, SEARCHES

TITLES = {"sentiment": "Sentiment of reviews", "recommendation": "The next item of a customer"}
CALLED = {
    "causes": "causal graph",
    "attention": "attention",
    "gradient": "gradient × input",
    "place": "place",
    "random": "random",
}
FOUND = {"sets": "small sets first", "prefix": "one more at a time"}
COLOURS = {"causes": "#d6701c", "attention": "#b03a8c", "gradient": "#2166ac", "place": "#2a9d8f", "random": "#8c959f"}
COLUMNS = ("changed", "tokens", "calls", "saves tokens", "saves calls")


def causes_study_tables(reading: CausesStudy, table: Callable[..., Table]) -> list[Any]:
    """Two tables an application, one a search: every order of tokens; and what comes in place of a recommendation."""
    rows, shown = reading.summary(), list[Any]()
    for name in dict.fromkeys(row["application"] for row in rows):
        models = [model for model in reading.models if model["application"] == name]
        shown.append(Text(f"{TITLES[name]}: {_models(models)}", style="bold"))
        for search in SEARCHES:
            found = [row for row in rows if (row["application"], row["search"]) == (name, search)]
            made = table(FOUND[search], *COLUMNS)
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


def changed(reading: CausesStudy, pyplot: Any) -> Any:
    """A panel an application: the share of predictions changed, by tokens hidden one after another, and by calls."""
    records = reading.records()
    names = list(dict.fromkeys(row["application"] for row in records))
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(0.6 + 2.9 * len(names), 4.4), layout="constrained", squeeze=False, sharey=True
    )
    for column, name in zip(axes.T, names, strict=True):
        for order in ORDERS:
            rows = [row for row in records if (row["application"], row["order"]) == (name, order)]
            _steps(column[0], [row["size"] for row in rows if row["search"] == "prefix"], order)
            sets = [row for row in rows if row["search"] == "sets"]
            _steps(column[1], [row["calls"] if row["size"] is not None else None for row in sets], order)
        column[0].set(title=TITLES[name], xlabel=f"tokens hidden, {FOUND['prefix']}")
        column[1].set(xlabel=f"calls of the model, {FOUND['sets']}", xscale="log")
        for axis in column:
            axis.spines[["top", "right"]].set_visible(False)
    for row in axes:
        row[0].set_ylabel("predictions changed")
    axes[0, 0].set_ylim(0, 1)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _steps(axis: Any, values: list[int | None], order: str) -> None:
    """The share of all that are at most so large; None is never."""
    there = sorted(value for value in values if value is not None)
    x = [1, *sorted(set(there) - {1})]
    y = [sum(value <= one for value in there) / len(values) for one in x]
    axis.plot(x, y, drawstyle="steps-post", color=COLOURS[order], linewidth=1.4, label=CALLED[order])
