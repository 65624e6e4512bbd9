"""Alarms of a monitor: rules over the records of all heads, each with its reason in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keyquery.support.checks import check_number

History = Mapping[str, np.ndarray]  # by metric: (records, heads), NaN where not measured
Alarm = dict[str, Any]  # heads, head (the worst), value, why
DEAD_RECORDS = 3  # for which the logits of a head must all be alike


@dataclass(frozen=True)
class Rules:
    """Which alarms a monitor raises, and their thresholds.

    The defaults are those of few false alarms in the study `stability`: of 57 trainings that diverged, `growth` warned
    of 49 and `loss` of 56, in 2 and in 0 of 22 healthy ones.
    """

    growth: bool = True  # the largest logit of a head is above `limit`
    loss: bool = True  # the mean loss between two records is not finite, or more than `loss_rise` above its lowest
    dead: bool = True  # a head's logits are all within `dead_range`, for 3 records: it attends alike to all keys
    rank: bool = True  # a head's effective rank is below `rank_share` of what it was first
    overflow: bool = True  # logits before scaling exceed `overflow_share` of their dtype's largest, or are not finite
    limit: float = 1000.0  # of the largest logit
    loss_rise: float = 0.15  # in nats
    dead_range: float = 1e-3  # of the logits
    rank_share: float = 0.1  # of the first effective rank
    overflow_share: float = 0.5  # of the largest float of the queries' dtype

    def __post_init__(self) -> None:
        for name in ("limit", "loss_rise", "dead_range", "rank_share", "overflow_share"):
            check_number(name, getattr(self, name))
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    def check(self, history: History, dtype: str = "float32", losses: Sequence[float | None] = ()) -> list[Alarm]:
        """Alarms of the last record; `losses` are those of all records, None where not finite."""
        alarms = {
            "growth": self._growth(history),
            "dead": self._dead(history),
            "rank": self._rank(history),
            "overflow": self._overflow(history, dtype),
            "loss": self._loss(losses),
        }
        return [{"rule": name, **alarm} for name, alarm in alarms.items() if alarm and getattr(self, name)]

    def _growth(self, history: History) -> Alarm | None:
        largest = history["largest"][-1]
        return _alarm(largest >= self.limit, largest, f"its largest logit is {{:.4g}}, above {self.limit:g}")

    def _dead(self, history: History) -> Alarm | None:
        if len(history["largest"]) <= DEAD_RECORDS or "smallest" not in history:
            return None
        ranges = (history["largest"] - history["smallest"])[-DEAD_RECORDS:]
        why = "its logits are all within {:.2g}: it attends alike to all keys"
        return _alarm(np.asarray(ranges.max(0) < self.dead_range), -ranges[-1], why)

    def _rank(self, history: History) -> Alarm | None:
        ranks = history.get("effective_rank")
        if ranks is None or np.isnan(ranks[-1]).all():
            return None
        first = ranks[~np.isnan(ranks).all(1)][0]
        why = f"its effective rank fell to {{:.3g}}, below {self.rank_share:g} of its first"
        return _alarm(ranks[-1] < self.rank_share * np.maximum(first, 1e-9), -ranks[-1], why)

    def _overflow(self, history: History, dtype: str) -> Alarm | None:
        if "finite" in history and (broken := history["finite"][-1] == 0).any():
            return _alarm(broken, np.full(len(broken), np.nan), "its logits are NaN or infinite")
        if "unscaled" not in history:
            return None
        sizes, end = history["unscaled"][-1], torch.finfo(getattr(torch, dtype)).max
        why = f"a score before scaling is {{:.4g}}, near the largest {dtype}, {end:.4g}"
        return _alarm(sizes > self.overflow_share * end, sizes, why)

    def _loss(self, losses: Sequence[float | None]) -> Alarm | None:
        if not losses:
            return None
        now, lowest = losses[-1], min((loss for loss in losses if loss is not None), default=math.nan)
        if now is None:
            return {"heads": [], "head": None, "value": math.nan, "why": "the loss is not finite"}
        if not now > lowest + self.loss_rise:
            return None
        why = f"the loss is {now:.4g}, {now - lowest:.2g} above its lowest"
        return {"heads": [], "head": None, "value": now, "why": why}


def _alarm(heads: np.ndarray, badness: np.ndarray, why: str) -> Alarm | None:
    """An alarm of some heads, if any, with the value of the worst in its reason."""
    if not heads.any():
        return None
    head = int(np.where(heads, np.nan_to_num(badness, nan=-np.inf), -np.inf).argmax())
    value = abs(float(badness[head]))
    return {"heads": np.flatnonzero(heads).tolist(), "head": head, "value": value, "why": why.format(value)}
