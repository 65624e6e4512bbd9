"""Warnings of every rule before the spike, run by run."""

from __future__ import annotations

from typing import Any

from keyquery.pages.colours import CLASSES
from keyquery_studies.stability.study import StabilityStudy


def warnings(reading: StabilityStudy, pyplot: Any) -> Any:
    """Steps of warning of each held-out run that diverged, by rule."""
    of = ("healthy", "held out", "both")
    chosen = [rule for rule in reading.rules if (rule["against"], rule["runs"], rule["recipe"]) == of]
    rules = list({rule["rule"]: rule for rule in chosen}.values())  # the fit may choose the usual threshold
    seeds = reading.provenance["plan"]["held_out"]
    lost = [row for row in reading.rows if row["tau"] is None and row["outcome"] == "diverged" and row["seed"] in seeds]
    figure, axis = pyplot.subplots(figsize=(7.0, 0.6 + 0.3 * len(rules)), layout="constrained")
    for at, rule in enumerate(rules):
        firsts = [(row["spike"], row["first"][rule["rule"]]) for row in lost]
        ahead = [spike - first for spike, first in firsts if first is not None]
        spread = [at + 0.5 * (index / max(len(ahead) - 1, 1) - 0.5) for index in range(len(ahead))]
        axis.plot(ahead, spread, "o", color=CLASSES[at % len(CLASSES)], markersize=3, alpha=0.7)
        missed = len(lost) - len(ahead)
        axis.annotate(f"{missed} missed", (0, at), (-4, 0), textcoords="offset points", ha="right", va="center", size=7)
    axis.set_yticks(range(len(rules)), [rule["rule"] for rule in rules])
    axis.invert_yaxis()
    axis.tick_params(axis="y", pad=48)
    axis.set(xlabel="steps of warning before the loss spikes", xlim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    return figure
