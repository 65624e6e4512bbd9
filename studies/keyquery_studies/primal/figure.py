"""Figure of the study `primal`: accuracies compared with published ones, and time per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keyquery.pages.colours import ATTENTIONS
from keyquery_studies.primal.study import PrimalStudy

TITLES = {"listops": "ListOps", "text": "Text", "image": "Image", "pathfinder": "Pathfinder"}
Rows = list[dict[str, Any]]


def worth(reading: PrimalStudy, pyplot: Any) -> Any:
    """Accuracy on time series and on the arena (hollow: published), and speed-up over fused softmax."""
    rows = reading.summary()
    of = {part: [row for row in rows if row["part"] == part] for part in ("series", "arena", "speed")}
    of["series"] = [row for row in of["series"] if row["protocol"] == "held out"]
    of["speed"] = [row for row in of["speed"] if row["ms"] is not None and row["attention"] != "general"]
    draw = {"series": _draw_series, "arena": _draw_arena, "speed": _draw_speed}
    drawn = [part for part in draw if of[part]]
    if not drawn:
        raise ValueError("a study of ablations alone has no figure: it needs the part series, arena or speed")
    figure, axes = pyplot.subplots(
        1, len(drawn), figsize=(0.6 + 3.1 * len(drawn), 3.0), layout="constrained", squeeze=False
    )
    for axis, part in zip(axes[0], drawn, strict=True):
        draw[part](axis, of[part])
        axis.spines[["top", "right"]].set_visible(False)
    handles = _legend(axes[0, 0], [row["attention"] for part in drawn for row in of[part]], "arena" in drawn)
    columns = len(handles) if len(drawn) > 1 else 2  # a single panel has room for two
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _legend(axis: Any, attentions: Sequence[str], published: bool) -> list[Any]:
    """Legend handles: one per attention drawn, and a hollow one for published results."""
    shown = [(called(name), colour) for name, colour in ATTENTIONS.items() if name in attentions]
    marks = [axis.plot([], [], "o", color=colour, markersize=4, label=name)[0] for name, colour in shown]
    hollow = {"color": "#6e7781", "markerfacecolor": "none", "markersize": 6, "label": "published"}
    return marks + ([axis.plot([], [], "o", **hollow)[0]] if published else [])


def _draw_series(axis: Any, rows: Rows) -> None:
    rows = labelled(rows)
    _dots(axis, rows, "dataset", list(dict.fromkeys(row["dataset"] for row in rows)))
    axis.set(title="time series (validation split)", ylabel="accuracy (%)")
    axis.tick_params("x", rotation=25)


def _draw_arena(axis: Any, rows: Rows) -> None:
    names = [name for name in TITLES if any(row["task"] == name for row in rows)]
    aside = _dots(axis, rows, "task", names)
    for row in rows:
        at, colour = names.index(row["task"]) + aside[row["attention"]], ATTENTIONS[row["attention"]]
        axis.plot(at, 100 * row["published"], "o", color=colour, markerfacecolor="none", markersize=6)
    labels = [TITLES[name] + _cut([row for row in rows if row["task"] == name]) for name in names]
    axis.set_xticks(range(len(names)), labels)
    partial = any(row["share_run"] < 1 for row in rows)
    axis.set(title="Long Range Arena" + " (fraction of steps)" * partial, ylabel="accuracy (%)")


def _draw_speed(axis: Any, rows: Rows) -> None:
    names, aside = [name for name in TITLES if any(row["task"] == name for row in rows)], _aside(rows)
    for row in rows:
        at, colour = names.index(row["task"]) + aside[row["attention"]], ATTENTIONS[row["attention"]]
        ends = [[row["faster"] - row["faster_low"]], [row["faster_high"] - row["faster"]]]
        axis.errorbar(at, row["faster"], yerr=ends, fmt="o", color=colour, markersize=4, capsize=2)
    axis.axhline(1, color=ATTENTIONS["general"], linewidth=0.8)
    axis.set_xticks(range(len(names)), [TITLES[name] for name in names])
    axis.set(title="training step", ylabel="speed-up over fused softmax", yscale="log")
    least, most = axis.get_ylim()
    ticks = [2.0**power for power in range(-8, 9) if least <= 2.0**power <= most]
    axis.set_yticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlim(-0.5, len(names) - 0.5)


def _dots(axis: Any, rows: Rows, key: str, names: list[str]) -> dict[str, float]:
    """Draw accuracies by name, and return the horizontal offset of each attention."""
    aside = _aside(rows)
    for row in rows:
        if row["accuracy"] is not None:
            at, colour = names.index(row[key]) + aside[row["attention"]], ATTENTIONS[row["attention"]]
            spread = 100 * (row["accuracy_sd"] or 0.0)
            axis.errorbar(at, 100 * row["accuracy"], yerr=spread, fmt="o", color=colour, markersize=4)
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, len(names) - 0.5)
    return aside


def _aside(rows: Rows) -> dict[str, float]:
    """Horizontal offsets of the attentions drawn, centred on the tick."""
    shown = [name for name in ATTENTIONS if any(row["attention"] == name for row in rows)]
    return {name: 0.18 * (place - (len(shown) - 1) / 2) for place, name in enumerate(shown)}


def _cut(rows: Iterable[dict[str, Any]]) -> str:
    share = min(row["share_run"] for row in rows)
    return "" if share >= 1 else f"\n({percent(share)})"


def percent(share: float) -> str:
    """A share for display, never 0 unless it is 0."""
    return f"{share:.0%}" if share >= 0.01 or share == 0 else f"{100 * share:.1g}%"


def labelled(rows: Rows) -> Rows:
    """Rows on time series, with width and epochs added to dataset names where they differ."""
    other = [key for key in ("width", "epochs") if len({row[key] for row in rows}) > 1]
    marks = ["".join(f", {key} {row[key]}" for key in other) for row in rows]
    return [{**row, "dataset": row["dataset"] + mark} for row, mark in zip(rows, marks, strict=True)]


def called(attention: str) -> str:
    """The display name of an attention."""
    return {"general": "softmax, fused", "eager": "softmax, eager"}.get(attention, attention)
