"""Rules that warn of a divergence, applied to the stored curves of a training: simple ones and those of the monitor.

Each family has thresholds to choose from. `FIXED` are rules of thumb; others are fit on calibration runs (`fit`), and
judged on runs that were held out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from keyquery.support.statistics import student
from keyquery_studies.stability.curves import unpacked
from keyquery_studies.stability.outcome import START

LIMITS = tuple(float(f"{10 ** (power / 4):.2g}") for power in range(5, 25))  # 18 to 1,000,000
HORIZONS = (0, 50, 100, 200, 400)
COLLAPSES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
JUMPS = (2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 50.0)
EXCESSES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
FALSE = 0.1  # share of stable runs in which an alarm may be raised
FAMILIES: dict[str, tuple[tuple[float, ...], ...]] = {
    "monitor": (LIMITS, HORIZONS, COLLAPSES),  # growth, or entropy below
    "growth": (LIMITS, HORIZONS),
    "entropy": (COLLAPSES[1:],),
    "largest logit": (LIMITS,),
    "bound": (LIMITS,),
    "gradient norm": (JUMPS,),
    "loss": (EXCESSES,),
}
WINDOW = 8  # records of a line through the logarithm of the largest logit
FLOOR = 0.1  # of the limit: logits below grow in every training, and the growth of most ends


@dataclass(frozen=True)
class Rule:
    """A family with its thresholds."""

    family: str
    thresholds: tuple[float, ...]

    def __str__(self) -> str:
        first = f"{self.thresholds[0]:g}"
        match self.family:
            case "monitor":
                return f"monitor (limit {first}, horizon {self.thresholds[1]:g}, entropy < {self.thresholds[2]:g})"
            case "growth":
                return f"growth (limit {first}, horizon {self.thresholds[1]:g})"
            case "entropy":
                return f"entropy < {first} of uniform"
            case "gradient norm":
                return f"gradient norm > {first} × median"
            case "loss":
                return f"loss > lowest + {first}"
        return f"{self.family} > {first}"


FIXED = (
    Rule("monitor", (100.0, 100.0, 0.05)),  # the default before this study
    Rule("largest logit", (50.0,)),
    Rule("largest logit", (100.0,)),
    Rule("bound", (1000.0,)),
    Rule("gradient norm", (5.0,)),
)


class Watched:
    """The curves of a training and the first warnings of rules in them."""

    def __init__(self, row: Mapping[str, Any], spike: int | None) -> None:
        curves = {name: unpacked(curve) for name, curve in row["curves"].items()}
        self.spike, every = spike, int(row["every"])
        self.largest = np.where(np.isnan(curves["largest"]), np.inf, curves["largest"])
        self.steps = np.arange(len(self.largest)) * every
        self._top, self._entropy = self.largest.max(1), np.nan_to_num(curves["entropy"])
        self._bound = np.where(np.isnan(curves["bound"]), np.inf, curves["bound"])
        self._jump = _jumps(curves["gradient"])
        self._excess = _excess(curves["loss"])
        self._every = every
        self._growth: dict[float, np.ndarray] = {}

    def first(self, rule: Rule) -> int | None:
        """The first step, from START to the spike, at which a rule warns; None if it never does."""
        x = rule.thresholds
        match rule.family:
            case "growth":
                return self._first(self._grown(x[1]) >= x[0])
            case "monitor":
                return self._first((self._grown(x[1]) >= x[0]) | (self._entropy < x[2]))
            case "entropy":
                return self._first(self._entropy < x[0])
            case "largest logit":
                return self._first(self._top > x[0])
            case "bound":
                return self._first(self._bound > x[0])
            case "gradient norm":
                return self._first(self._jump > x[0], late=True)
            case "loss":
                return self._first(self._excess > x[0], late=True)
        raise ValueError(f"there is no rule {rule.family!r}")

    def _first(self, warns: np.ndarray, late: bool = False) -> int | None:
        """`late`: of blocks of steps, which are known only at their end."""
        steps = np.arange(len(warns)) * self._every + (self._every if late else 0)
        end = math.inf if self.spike is None else self.spike
        at = np.flatnonzero(warns & (steps >= START) & (steps < end))
        return int(steps[at[0]]) if len(at) else None

    def _grown(self, horizon: float) -> np.ndarray:
        """The highest limit at which the growth alarm is raised, by record: of all heads, the largest of what the
        largest logit is, and of what it will be within the horizon, up to 1 / FLOOR times what it is.
        """
        if horizon not in self._growth:
            window, highest = WINDOW, self._top.copy()
            for at in range(window - 1, len(highest)):
                steps = self.steps[at - window + 1 : at + 1]
                low, slope = predicted(
                    self.largest[at - window + 1 : at + 1], steps.tolist(), float(steps[-1]) + horizon
                )
                ahead = np.where(slope > 0, np.exp(np.minimum(low, 700.0)), 0.0)
                highest[at] = max(highest[at], np.minimum(ahead, self.largest[at] / FLOOR).max())
            self._growth[horizon] = highest
        return self._growth[horizon]


def predicted(values: np.ndarray, steps: Sequence[int], step: float) -> tuple[np.ndarray, np.ndarray]:
    """The lower end of the 95 % interval of ln(values) at a step, and the slope, of a straight line per column.

    −inf for values that are not above 0.
    """
    count = len(values)
    good = ((values > 0) & np.isfinite(values)).all(0)
    logs = np.log(np.where(good, values, 1.0))
    x = np.asarray(steps, float)
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope, middle = centred @ logs / spread, logs.mean(0)
    noise = np.sqrt(np.square(logs - middle - np.outer(centred, slope)).sum(0) / (count - 2))
    half = student(count - 2) * noise * math.sqrt(1 / count + (step - x.mean()) ** 2 / spread)
    return np.where(good, middle + slope * (step - x.mean()) - half, -np.inf), np.where(good, slope, 0.0)


def _jumps(gradients: np.ndarray) -> np.ndarray:
    """The largest gradient norm of every block of steps over the median of the 10 blocks before."""
    middle, top = np.where(np.isnan(gradients), np.inf, gradients).T
    before = [np.median(middle[max(at - 10, 0) : at]) if at else np.inf for at in range(len(top))]
    return np.array([t / b if math.isfinite(b) and b > 0 else 0.0 for t, b in zip(top, before, strict=True)])


def _excess(means: np.ndarray) -> np.ndarray:
    lowest = np.minimum.accumulate(means)
    return np.where(np.isfinite(means), means - np.where(np.isfinite(lowest), lowest, 0.0), np.inf)


def judged(rule: Rule, lost: Sequence[Watched], stable: Sequence[Watched]) -> dict[str, Any]:
    """Median steps of warning over runs that diverged (0 where it did not warn), and false alarms in stable ones."""
    firsts = [run.first(rule) for run in lost]
    ahead = [0 if at is None or run.spike is None else run.spike - at for run, at in zip(lost, firsts, strict=True)]
    return {
        "rule": str(rule),
        "median_warning": median(ahead) if ahead else None,
        "warned": sum(steps > 0 for steps in ahead),
        "diverged": len(lost),
        "false_alarms": sum(run.first(rule) is not None for run in stable),
        "stable": len(stable),
    }


def fit(family: str, lost: Sequence[Watched], stable: Sequence[Watched]) -> Rule:
    """The thresholds with the longest median warning among those with false alarms in at most 1 of 10 stable runs.

    If none has so few, those with the fewest. Of equally good ones, the one with fewer false alarms, then the one that
    warns of more runs, then the highest.
    """
    best, score = None, None
    for thresholds in product(*FAMILIES[family]):
        rule = Rule(family, thresholds)
        result = judged(rule, lost, stable)
        many = max(result["false_alarms"] - math.floor(FALSE * len(stable)), 0)
        this = (-many, result["median_warning"] or 0, -result["false_alarms"], result["warned"], thresholds)
        if score is None or this > score:
            best, score = rule, this
    assert best is not None
    return best
