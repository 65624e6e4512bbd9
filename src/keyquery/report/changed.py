"""The study of causes as tables in the terminal and as a picture: what it takes to change a prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.instruments.intervals import Interval
from keyquery.report.trainings import seeds_of
from keyquery.studies.causes import CausesStudy
from keyquery.studies.explained import ORDERS, SEARCHES

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
    """Two tables an application, one a search: every order of tokens."""
    rows, shown = reading.summary(), list[Any]()
    for name in dict.fromkeys(row["application"] for row in rows):
        models = [model for model in reading.models if model["application"] == name]
        wide = models[0]["among_ten"] is not None
        shown += [*([""] if shown else []), Text(f"{TITLES[name]}: {_models(models)}", style="bold")]
        for search in SEARCHES:
            made = table(FOUND[search], *COLUMNS, *(("place before", "of ten stay") if wide else ()))
            for row in (row for row in rows if (row["application"], row["search"]) == (name, search)):
                made.add_row(*_cells(row, wide))
            shown += [made, ""]
    return [*shown[:-1], *_legend(reading)]


def _models(models: list[Any]) -> str:
    """How good they are."""
    wide = models[0]["among_ten"] is not None
    shares = [model["among_ten" if wide else "accuracy"] for model in models]
    among = " among the ten recommended" if wide else ""
    least, most = f"{min(shares):.1%}", f"{max(shares):.1%}"
    said = least if least == most else f"{least} to {most}"
    count = {"seeds": len(models)}
    return f"{said} right{among}, by counting alone {models[0]['popular']:.1%}; {seeds_of([count])}"


def _cells(row: dict[str, Any], wide: bool) -> list[str]:
    ours = row["order"] == ORDERS[0]
    saved = ["", ""] if ours else [_mean(row[name], 2) for name in ("shorter", "fewer")]
    cells = [CALLED[row["order"]], _mean(row["found"], 2), _mean(row["size"], 2), _mean(row["calls"], 0)]
    if not wide:
        return cells + saved
    return [*cells, *saved, str(row["rank"] or ""), "" if row["kept"] is None else f"{10 * row['kept']:.1f}"]


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
    """A panel an application: the share of predictions that a set of so many tokens, or fewer, has changed."""
    records = [row for row in reading.records() if row["search"] == "sets"]
    names = list(dict.fromkeys(row["application"] for row in records))
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(0.6 + 2.9 * len(names), 4.4), layout="constrained", squeeze=False, sharey=True
    )
    for column, name in zip(axes.T, names, strict=True):
        for order in ORDERS:
            rows = [row for row in records if (row["application"], row["order"]) == (name, order)]
            _steps(column[0], [row["size"] for row in rows], order)
            _steps(column[1], [row["calls"] if row["size"] is not None else None for row in rows], order)
        column[0].set(title=TITLES[name], xlabel="tokens hidden", xticks=range(1, reading.provenance["largest"] + 1))
        column[1].set(xlabel="calls of the model", xscale="log")
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
    x, y = [1.0], [sum(value <= 1 for value in there) / len(values)]
    for value in sorted(set(there) - {1}):
        x.append(value)
        y.append(sum(other <= value for other in there) / len(values))
    axis.plot(x, y, drawstyle="steps-post", color=COLOURS[order], linewidth=1.4, label=CALLED[order])
