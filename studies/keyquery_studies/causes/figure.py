"""Figure of the study `causes`: what it takes to change a prediction."""

from __future__ import annotations

from typing import Any

from keyquery_studies.causes.searches import ORDERS
from keyquery_studies.causes.study import CausesStudy

TITLES = {"sentiment": "Sentiment of reviews", "recommendation": "Next item of a customer"}
CALLED = {
    "causes": "causal graph",
    "attention": "attention",
    "gradient": "gradient × input",
    "place": "position",
    "random": "random",
}
FOUND = {"sets": "smallest sets first", "prefix": "growing prefix"}
COLOURS = {"causes": "#d6701c", "attention": "#b03a8c", "gradient": "#2166ac", "place": "#2a9d8f", "random": "#8c959f"}


def changed(reading: CausesStudy, pyplot: Any) -> Any:
    """One panel per application: the share of predictions changed, by number of masked tokens and of model queries."""
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
        column[0].set(title=TITLES[name], xlabel=f"masked tokens, {FOUND['prefix']}")
        column[1].set(xlabel=f"model queries, {FOUND['sets']}", xscale="log")
        column[1].xaxis.set_major_formatter("{x:g}")
        for axis in column:
            axis.spines[["top", "right"]].set_visible(False)
    for row in axes:
        row[0].set_ylabel("predictions changed")
    axes[0, 0].set_ylim(0, 1)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _steps(axis: Any, values: list[int | None], order: str) -> None:
    """The empirical distribution function; None counts as infinite."""
    finite = sorted(value for value in values if value is not None)
    x = [1, *sorted(set(finite) - {1})]
    y = [sum(value <= limit for value in finite) / len(values) for limit in x]
    axis.plot(x, y, drawstyle="steps-post", color=COLOURS[order], linewidth=1.4, label=CALLED[order])
