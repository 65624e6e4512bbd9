"""Figure of the study `time`: gain of each time encoding over order alone."""

from __future__ import annotations

from typing import Any

from keyquery_studies.common.comparisons import difference
from keyquery_studies.time.study import TimeStudy

TITLES = {
    "badges": "Stack Overflow badges",
    "retail": "Online Retail",
    "cdnow": "CDNOW",
    "hawkes": "Hawkes (simulated)",
}
NAMES = {"order": "nothing", "gap": "input", "kernel": "in the scores", "both": "both"}
WAYS = {
    ("positions", "concatenated", False): "positions",
    ("bochner", "concatenated", False): "Bochner, concatenated",
    ("mercer", "concatenated", False): "Mercer, concatenated",
    ("mercer", "additive", False): "Mercer, additive",
    ("mercer", "interaction", False): "Mercer, interaction",
    ("mercer", "concatenated", True): "Mercer, calendar time",
}
COLOURS = {"past": "#2166ac", "target_time": "#8c959f"}
KNOWN = {"past": "history only", "target_time": "history and time of the event"}


def gains(reading: TimeStudy, pyplot: Any) -> Any:
    """One panel per dataset: gain in nats per event over positions, mean and standard deviation over seeds."""
    if reading.arms:
        return _arms(reading, pyplot)
    rows = [row for row in reading.summary() if row["gain"] is not None and row["time"] != "positions"]
    if not rows:
        raise ValueError("there is nothing to compare: no dataset has both a model with times and one with positions")
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    names = [way for way in WAYS if any(way_of(row) == way for row in rows)]
    width = 1.6 + 2.1 * len(sets)
    size, shared = (width, 2.6), {"sharex": True, "sharey": True}  # gains of all sets on one scale
    figure, axes = pyplot.subplots(1, len(sets), figsize=size, layout="constrained", squeeze=False, **shared)
    for axis, dataset in zip(axes[0], sets, strict=True):
        axis.axvline(0, color="#24292f", linewidth=0.8)
        for row in (row for row in rows if row["dataset"] == dataset):
            at, known = names.index(way_of(row)), row["information"]
            place = at + (0.2 if known == "target_time" else 0.0)
            colour, label = COLOURS[known], KNOWN[known]
            axis.plot(row["gain"], place, "o", color=colour, markersize=4, label=label)
            if row["gain_sd"] is not None:
                ends = [row["gain"] - row["gain_sd"], row["gain"] + row["gain_sd"]]
                axis.plot(ends, [place, place], color=colour, linewidth=1)
        axis.set(title=TITLES[dataset])
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.1, y=0.15)
    axes[0][0].set_yticks(range(len(names)), [WAYS[name] for name in names])
    axes[0][0].invert_yaxis()
    figure.supxlabel("gain over positions, nats per event", fontsize=8)
    handles = {label: handle for handle, label in zip(*axes[0][0].get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def way_of(row: dict[str, Any]) -> tuple[str, str, bool]:
    """The time encoding, how it is combined, and its origin."""
    return row["time"], row["how"], row["calendar"]


def _arms(reading: TimeStudy, pyplot: Any) -> Any:
    """One panel per dataset: nats per event below the arm without times, mean and 95 % interval over seeds."""
    sets = list(dict.fromkeys(row["dataset"] for row in reading.arms))
    figure, axes = pyplot.subplots(1, len(sets), figsize=(7.4, 2.2), layout="constrained", squeeze=False, sharey=True)
    for axis, dataset in zip(axes[0], sets, strict=True):
        own = {arm: [r for r in reading.arms if (r["dataset"], r["arm"]) == (dataset, arm)] for arm in NAMES}
        for place, arm in enumerate(list(NAMES)[1:]):
            row = difference(own["order"], own[arm], "nll_type")
            if row["low"] is not None:
                axis.plot([place, place], [row["low"], row["high"]], color=COLOURS["past"], linewidth=2)
                axis.plot([place], [row["change"]], "o", color=COLOURS["past"])
        if dataset == "hawkes" and reading.exact:
            mean = sum(row["nll_type"] for row in own["order"]) / len(own["order"])
            axis.axhline(mean - reading.exact["nll_type"], color=COLOURS["target_time"], linestyle="--", label="exact")
            axis.legend(frameon=False, fontsize=7, loc="lower right")
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_xticks(range(3), list(NAMES.values())[1:], fontsize=7)
        axis.set_xlim(-0.5, 2.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(TITLES[dataset], fontsize=8)
    axes[0][0].set_ylabel("gain, nats per event")
    return figure
