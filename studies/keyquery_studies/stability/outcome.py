"""How a training ended, and when each rule would have warned: both from its stored curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyquery.instruments.monitor.alarms import Rules

SMOOTH = 10  # steps over which losses are averaged
SPIKE = 0.5  # nats above the lowest mean so far: the loss spikes
LASTING = 3  # means in a row
START = 50  # steps before which nothing counts, of warnings and of spikes: the first steps are always rough
GRADIENT = 5.0  # times the median of the last steps
RULES = ("monitor", "growth", "entropy", "bound > 1000", "logit > 50", "logit > 100", "gradient norm")


def outcome(row: Mapping[str, Any]) -> dict[str, Any]:
    """ "diverged" if the loss spikes and ends above that; "stable" if it never does; else "recovered".

    `spike` is the first step of the spike, `lowest` the lowest mean loss before it, `final` the mean of the last steps.
    """
    losses = np.array([math.nan if value is None else value for value in row["loss"]])
    whole = losses[: len(losses) // SMOOTH * SMOOTH].reshape(-1, SMOOTH)
    means = np.where(np.isfinite(whole).all(1), whole.mean(1), np.inf)
    lowest = np.minimum.accumulate(means)
    high = means > np.concatenate((means[:1], lowest[:-1])) + SPIKE
    high[: START // SMOOTH] = False
    runs = [
        at
        for at in range(len(high))
        if high[at : at + LASTING].all() and (at + LASTING <= len(high) or np.isinf(means[at]))
    ]
    lost = np.flatnonzero(np.isinf(means))
    runs = runs or lost[:1].tolist()  # lost from the first steps on
    spike = runs[0] * SMOOTH if runs else None
    final = float(means[-5:].mean()) if np.isfinite(means[-5:]).all() else None
    before = float(lowest[max(runs[0] - 1, 0)] if runs else lowest[-1])
    before = before if math.isfinite(before) else math.log(row["vocabulary"])  # lost from the first steps on
    ended = "diverged" if final is None or final > before + SPIKE else "recovered"
    return {"outcome": "stable" if spike is None else ended, "spike": spike, "lowest": before, "final": final}


def first_warning(row: Mapping[str, Any], spike: int | None) -> dict[str, int | None]:
    """The first step, from START to the spike, at which each rule warns; None if it never does."""
    steps = row["recorded"]
    end = math.inf if spike is None else spike
    largest = np.array([[np.inf if v is None else v for v in values] for values in row["largest"]])
    top = largest.max(1)
    bound = np.array([math.nan if v is None else v for v in row["bound"]])
    gradients = np.array([math.inf if v is None else v for v in row["gradient"]])
    found: dict[str, int | None] = {
        "logit > 50": _first(steps, top > 50, end),
        "logit > 100": _first(steps, top > 100, end),
        "bound > 1000": _first(steps, bound > 1000, end),
        "gradient norm": _first(range(len(gradients)), _jumps(gradients), end),
        "growth": _first(steps, grows(largest, steps), end),
        "entropy": _first(
            steps, np.array([[v or 0.0 for v in layers] for layers in row["entropy"]]).min(1) < Rules().collapse, end
        ),
    }
    ours = [step for step in (found["growth"], found["entropy"]) if step is not None]
    return {"monitor": min(ours) if ours else None, **{rule: found[rule] for rule in RULES[1:]}}


def grows(largest: np.ndarray, steps: Sequence[int], rules: Rules | None = None) -> np.ndarray:
    """At which records the growth alarm is raised."""
    rules = rules or Rules(entropy=False, dead=False, rank=False, overflow=False)
    return np.array(
        [bool(rules.check({"largest": largest[: at + 1]}, steps[: at + 1])) for at in range(len(steps))], dtype=bool
    )


def _jumps(gradients: np.ndarray) -> np.ndarray:
    """Gradient norms above GRADIENT times the median of the 100 steps before."""
    found = np.zeros(len(gradients), bool)
    for at in range(START, len(gradients)):
        found[at] = gradients[at] > GRADIENT * np.median(gradients[max(at - 100, 0) : at])
    return found


def _first(steps: Sequence[int], warns: np.ndarray, end: float) -> int | None:
    return next((int(step) for step, warned in zip(steps, warns, strict=True) if warned and START <= step < end), None)
