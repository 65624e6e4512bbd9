"""How a training ended, from its loss: it stayed stable, it spiked and recovered, or it diverged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keyquery_studies.stability.curves import unpacked

SMOOTH = 10  # steps over which losses are averaged
SPIKE = 0.5  # nats above the lowest mean so far: the loss spikes
LASTING = 3  # means in a row
START = 50  # steps before which nothing counts, of warnings and of spikes: the first steps are always rough


def outcome(row: Mapping[str, Any]) -> dict[str, Any]:
    """ "diverged" if the loss spikes and ends above that; "stable" if it never does; else "recovered".

    `spike` is the first step of the spike, `lowest` the lowest mean loss before it, `final` the mean of the last 50
    steps.
    """
    means = unpacked(row["curves"]["loss"])
    lowest = np.minimum.accumulate(means)
    high = means > np.concatenate((means[:1], lowest[:-1])) + SPIKE
    high[: START // SMOOTH] = False
    runs = [
        at
        for at in range(len(high))
        if high[at : at + LASTING].all() and (at + LASTING <= len(high) or np.isinf(means[at]))
    ]
    runs = runs or np.flatnonzero(np.isinf(means))[:1].tolist()  # lost in the first steps
    spike = runs[0] * SMOOTH if runs else None
    final = float(means[-5:].mean()) if np.isfinite(means[-5:]).all() else None
    before = float(lowest[max(runs[0] - 1, 0)] if runs else lowest[-1])
    before = before if math.isfinite(before) else math.log(row["vocabulary"])  # lost in the first steps
    ended = "diverged" if final is None or final > before + SPIKE else "recovered"
    return {"outcome": "stable" if spike is None else ended, "spike": spike, "lowest": before, "final": final}


def means_of(losses: np.ndarray) -> np.ndarray:
    """The mean loss of every 10 steps; infinite if one of them is not finite."""
    whole = losses[: len(losses) // SMOOTH * SMOOTH].reshape(-1, SMOOTH)
    return np.where(np.isfinite(whole).all(1), whole.mean(1), np.inf)
