"""The columns and training rows that a prediction depends on, as a figure."""

from __future__ import annotations

from typing import Any

from keyquery.learn.in_context.explanation import InContextExplanation
from keyquery.learn.npt.explanation import NPTExplanation
from keyquery.pages.colours import AGAINST, FOR
from keyquery.support.checks import check_count
from keyquery.support.extras import optional

GREY = "#8c959f"
LETTERS = 24  # characters of a name that are shown


def explanation(reading: NPTExplanation | InContextExplanation, pyplot: Any, most: int = 12) -> Any:
    """Left, the drop of the prediction without each column; right, attention to training rows, and their effects."""
    check_count("most", most, least=1)
    columns = sorted(reading.columns, key=lambda column: -abs(column["effect"]))[:most]
    rows = [row for row in reading.rows if row["attention"] > 0][:most]
    size = (7.2, 1.3 + 0.19 * max(len(columns), len(rows), 3))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=size, layout="constrained")
    values = [f"{column['column']} = {_shown(column['value'])}" for column in columns]
    _bars(left, values, [column["effect"] for column in columns])
    left.set_xlabel(f"drop without the column ({_unit(reading)})")
    names = [f"row {row['row']}: {_shown(row['target'])}" for row in rows]
    right.barh(range(len(rows)), [row["attention"] for row in rows], color=GREY, alpha=0.45, height=0.7)
    _names(right, names)
    right.set_xlabel("attention (bars)")
    tested = [(position, row["effect"]) for position, row in enumerate(rows) if row["effect"] is not None]
    if tested:
        above = right.twiny()
        colours = [FOR if effect >= 0 else AGAINST for _, effect in tested]
        above.scatter([effect for _, effect in tested], [position for position, _ in tested], c=colours, s=12, zorder=3)
        above.axvline(0, color=GREY, linewidth=0.6)
        above.set_xlabel(f"drop without the row ({_unit(reading)}; dots)")
        above.spines["right"].set_visible(False)
    else:
        right.spines["top"].set_visible(False)
    right.spines["right"].set_visible(False)
    sure = "" if reading.probability is None else f" ({reading.probability:.0%})"
    figure.suptitle(f"predicted {_shown(reading.predicted)}{sure}", x=0.01, ha="left", weight="bold", fontsize=9)
    patch = optional("matplotlib.patches", "plot").Patch
    keys = [patch(color=colour, label=word) for word, colour in (("evidence for", FOR), ("evidence against", AGAINST))]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _bars(axis: Any, names: list[str], effects: list[float]) -> None:
    axis.barh(range(len(names)), effects, color=[FOR if effect >= 0 else AGAINST for effect in effects], height=0.7)
    axis.axvline(0, color=GREY, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    _names(axis, names)


def _names(axis: Any, names: list[str]) -> None:
    """Label the rows from top to bottom."""
    axis.set_yticks(range(len(names)), names)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(max(len(names), 1) - 0.4, -0.6)


def _unit(reading: NPTExplanation | InContextExplanation) -> str:
    return "units of the target" if reading.probability is None else "log-odds"


def _shown(value: Any) -> str:
    text = "none" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"


FIGURES = {"explanation": explanation}
