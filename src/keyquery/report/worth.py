"""The study of primal attention as a picture: accuracies beside published ones, and what a step costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keyquery.report.colours import ATTENTIONS
from keyquery.studies.primal import PrimalStudy

TITLES = {"listops": "ListOps", "text": "Text", "image": "Image", "pathfinder": "Pathfinder"}
Rows = list[dict[str, Any]]


def worth(reading: PrimalStudy, pyplot: Any) -> Any:
    """Accuracies on series and on the arena, published ones as hollow marks, and how many times as fast as fused."""
    rows = reading.summary()
    of = {part: [row for row in rows if row["part"] == part] for part in ("series", "arena", "speed")}
    of["series"] = [row for row in of["series"] if row["protocol"] == "held out"]
    of["speed"] = [row for row in of["speed"] if row["ms"] is not None and row["attention"] != "general"]
    draw = {"series": _draw_series, "arena": _draw_arena, "speed": _draw_speed}
    there = [part for part in draw if of[part]]
    if not there:
        raise ValueError("a study of variants alone has no picture: it needs the part series, arena or speed")
    figure, axes = pyplot.subplots(
        1, len(there), figsize=(0.6 + 3.1 * len(there), 2.7), layout="constrained", squeeze=False
    )
    for axis, part in zip(axes[0], there, strict=True):
        draw[part](axis, of[part])
        axis.spines[["top", "right"]].set_visible(False)
    handles = {
        label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_series(axis: Any, rows: Rows) -> None:
    rows = told_apart(rows)
    _dots(axis, rows, "dataset", list(dict.fromkeys(row["dataset"] for row in rows)))
    axis.set(title="series (held out)", ylabel="accuracy, %")
    axis.tick_params("x", rotation=25)


def _draw_arena(axis: Any, rows: Rows) -> None:
    names = [name for name in TITLES if any(row["task"] == name for row in rows)]
    _dots(axis, rows, "task", names)
    for row in rows:
        at = names.index(row["task"]) + _aside(row["attention"])
        colour = ATTENTIONS[row["attention"]]
        axis.plot(at, 100 * row["published"], "o", color=colour, markerfacecolor="none", markersize=6)
    axis.plot([], [], "o", color="#6e7781", markerfacecolor="none", markersize=6, label="published")
    labels = [TITLES[name] + _cut([row for row in rows if row["task"] == name]) for name in names]
    axis.set_xticks(range(len(names)), labels)
    cut = any(row["share_run"] < 1 for row in rows)
    axis.set(title="Long Range Arena" + " (share of the steps)" * cut, ylabel="accuracy, %")


def _draw_speed(axis: Any, rows: Rows) -> None:
    names = [name for name in TITLES if any(row["task"] == name for row in rows)]
    for row in rows:
        at, colour = names.index(row["task"]) + _aside(row["attention"]), ATTENTIONS[row["attention"]]
        ends = [[row["faster"] - row["faster_low"]], [row["faster_high"] - row["faster"]]]
        label = called(row["attention"])
        axis.errorbar(at, row["faster"], yerr=ends, fmt="s", color=colour, markersize=4, capsize=2, label=label)
    axis.axhline(1, color=ATTENTIONS["general"], linewidth=0.8)
    axis.set_xticks(range(len(names)), [TITLES[name] for name in names])
    axis.set(title="a training step", ylabel="times as fast as fused softmax", yscale="log")
    least, most = axis.get_ylim()
    ticks = [2.0**power for power in range(-8, 9) if least <= 2.0**power <= most]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.margins(x=0.15)


def _dots(axis: Any, rows: Rows, key: str, names: list[str]) -> None:
    for row in rows:
        if row["accuracy"] is not None:
            at, colour = names.index(row[key]) + _aside(row["attention"]), ATTENTIONS[row["attention"]]
            spread, label = 100 * (row["accuracy_sd"] or 0.0), called(row["attention"])
            axis.errorbar(at, 100 * row["accuracy"], yerr=spread, fmt="o", color=colour, markersize=4, label=label)
    axis.set_xticks(range(len(names)), names)
    axis.margins(x=0.15)


def _aside(attention: str) -> float:
    """Attentions stand beside each other over one name."""
    return 0.18 * (list(ATTENTIONS).index(attention) - 1)


def _cut(rows: Iterable[dict[str, Any]]) -> str:
    share = min(row["share_run"] for row in rows)
    return "" if share >= 1 else f"\n({share:.0%})"


def told_apart(rows: Rows) -> Rows:
    """Rows on series, the names of sets with what else differs between the networks: their width, their epochs."""
    other = [key for key in ("width", "epochs") if len({row[key] for row in rows}) > 1]
    marks = ["".join(f", {key} {row[key]}" for key in other) for row in rows]
    return [{**row, "dataset": row["dataset"] + mark} for row, mark in zip(rows, marks, strict=True)]


def called(attention: str) -> str:
    """How an attention is called where it is shown."""
    return {"general": "softmax, fused", "eager": "softmax, eager"}.get(attention, attention)
