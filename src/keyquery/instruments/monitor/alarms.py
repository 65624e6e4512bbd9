"""Alarms of a monitor: rules over the records of all heads, each with its reason in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keyquery.support.checks import check_count, check_number
from keyquery.support.statistics import student

History = Mapping[str, np.ndarray]  # by metric: (records, heads), NaN where not measured
FLOOR = 0.1  # of the limit: logits below grow in every training, and the growth of most ends
SHORT = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Rules:
    """Which alarms a monitor raises, and their thresholds.

    The defaults are those of few false alarms in the study `stability`: of 57 trainings that diverged, `growth` warned
    of 49 and `loss` of 56, in 2 and in 0 of 22 healthy ones.

    Parameters
    ----------
    growth
        The largest logit of a head is above `limit`, or is above a tenth of it and will pass it within `horizon` steps,
        by the lower end of the 95 % interval of a line through its logarithm at the last `window` records.
        Default: True.
    loss
        The loss, where the monitor is given it (`Monitor.add_loss`), is not finite, or more than `loss_rise` above its
        lowest; each is the mean of the steps between two records. Default: True.
    entropy
        The mean entropy of a layer's heads is below `collapse` times that of uniform attention. Default: False.
    dead
        A head's logits are all within `dead_range`, for 3 records: it attends alike to all keys. Default: True.
    rank
        A head's effective rank is below `rank_share` of what it was first. Default: True.
    overflow
        Logits before scaling, or entries of queries or keys, exceed `overflow_share` of the largest float of `dtype`,
        or are not finite. Entries are known where torch's fused attention is called, not its softmax alone.
        Default: True.
    limit, horizon, window, loss_rise, collapse, dead_range, rank_share, overflow_share
        Thresholds, as above.
    dtype
        "fp16", "bf16", or for scaled FP8 "e4m3" or "e5m2". Default: that of the queries.

    Examples
    --------
    >>> Rules(limit=50).check({"largest": np.full((1, 1), 60.0)}, [0])[0]["rule"]
    'growth'
    """

    growth: bool = True
    loss: bool = True
    entropy: bool = False
    dead: bool = True
    rank: bool = True
    overflow: bool = True
    limit: float = 1000.0
    horizon: int = 0
    window: int = 8
    loss_rise: float = 0.15
    collapse: float = 0.05
    dead_range: float = 1e-3
    rank_share: float = 0.1
    overflow_share: float = 0.5
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "loss_rise", "collapse", "dead_range", "rank_share", "overflow_share"):
            check_number(name, getattr(self, name))
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("growth", "loss", "entropy", "dead", "rank", "overflow"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        check_count("horizon", self.horizon, least=0)
        check_count("window", self.window, least=4)
        if self.dtype is not None and self.dtype not in SHORT:
            raise ValueError(f"dtype must be one of {', '.join(SHORT)}, got {self.dtype!r}")

    def check(
        self,
        history: History,
        steps: Sequence[int],
        layers: Sequence[int] = (),
        dtype: str = "",
        losses: Sequence[float | None] = (),
    ) -> list[dict[str, Any]]:
        """Alarms of the last record: {rule, heads, head (the worst), value, reason}; `losses` are those of all records.

        Where a loss is None it is not finite.
        """
        alarms = []
        for name in ("growth", "entropy", "dead", "rank", "overflow"):
            if getattr(self, name):
                alarm = getattr(self, f"_{name}")(history, steps, layers, dtype)
                if alarm is not None:
                    alarms.append({"rule": name, **alarm})
        if self.loss and (alarm := self._loss(losses)) is not None:
            alarms.append({"rule": "loss", **alarm})
        return alarms

    def _loss(self, losses: Sequence[float | None]) -> dict[str, Any] | None:
        if not losses:
            return None
        now, lowest = losses[-1], min((loss for loss in losses if loss is not None), default=math.nan)
        if now is None:
            why = "the loss is not finite"
        elif now > lowest + self.loss_rise:
            why = f"the loss is {now:.4g}, {now - lowest:.2g} above its lowest"
        else:
            return None
        return {"heads": [], "head": None, "value": math.nan if now is None else now, "why": why}

    def _growth(self, history: History, steps: Sequence[int], *_: Any) -> dict[str, Any] | None:
        largest = history["largest"]
        now = largest[-1]
        above = now >= self.limit
        rising = (now >= FLOOR * self.limit) & (len(largest) >= self.window)
        if not (above | rising).any():  # nearly always
            return None
        low, slope = predicted(largest[-self.window :], steps[-self.window :], steps[-1] + self.horizon)
        rising &= (low >= math.log(self.limit)) & (slope > 0)
        if not (above | rising).any():
            return None
        head = int(np.nanargmax(np.where(above | rising, np.where(np.isnan(now), -np.inf, now), -np.inf)))
        value = float(now[head])
        if above[head]:
            why = f"its largest logit is {value:.4g}, above {self.limit:g}"
        else:
            within = math.log(self.limit / max(value, 1e-9)) / slope[head]
            why = (
                f"its largest logit, {value:.4g}, grows {100 * math.expm1(slope[head]):.2g} % a step and passes "
                f"{self.limit:g} in about {within:.0f} steps"
            )
        return _alarm(above | rising, head, value, why)

    def _entropy(self, history: History, steps: Sequence[int], layers: Sequence[int], *_: Any) -> dict[str, Any] | None:
        if "relative_entropy" not in history:
            return None
        now = history["relative_entropy"][-1]
        where = np.asarray(layers if len(layers) else np.zeros(len(now), int))
        known = ~np.isnan(now)
        totals, counts = np.bincount(where, np.where(known, now, 0.0)), np.bincount(where, known)
        below = np.flatnonzero((counts > 0) & (totals < self.collapse * counts))
        if not len(below):
            return None
        low = {int(layer): float(np.nanmean(now[where == layer])) for layer in below}
        worst = min(low, key=low.__getitem__)
        heads = np.isin(where, list(low))
        head = int(np.nanargmin(np.where(where == worst, now, np.inf)))
        why = f"the mean entropy of its layer is {100 * low[worst]:.2g} % of that of uniform attention"
        return _alarm(heads, head, low[worst], why)

    def _dead(self, history: History, *_: Any) -> dict[str, Any] | None:
        if len(history["largest"]) < 4 or "smallest" not in history:
            return None
        spread = history["largest"][-3:] - history["smallest"][-3:]
        flat = np.all(spread < self.dead_range, axis=0, keepdims=False)
        if not flat.any():
            return None
        head = int(np.nanargmin(np.where(flat, spread[-1], np.inf)))
        value = float(spread[-1, head])
        return _alarm(flat, head, value, f"its logits are all within {value:.2g}: it attends alike to all keys")

    def _rank(self, history: History, *_: Any) -> dict[str, Any] | None:
        ranks = history.get("effective_rank")
        if ranks is None or np.isnan(ranks[-1]).all():
            return None
        measured = ranks[~np.isnan(ranks).all(1)]
        share = measured[-1] / np.maximum(measured[0], 1e-9)
        low = share < self.rank_share
        if not low.any():
            return None
        head = int(np.nanargmin(share))
        why = f"its effective rank fell from {measured[0, head]:.3g} to {measured[-1, head]:.3g}"
        return _alarm(low, head, float(measured[-1, head]), why)

    def _overflow(
        self, history: History, steps: Sequence[int], layers: Sequence[int], dtype: str
    ) -> dict[str, Any] | None:
        now = history["largest"][-1]
        broken = history["finite"][-1] == 0 if "finite" in history else np.zeros(len(now), bool)
        if broken.any():
            return _alarm(broken, int(broken.argmax()), math.nan, "its logits are NaN or infinite")
        kind = SHORT[self.dtype] if self.dtype else getattr(torch, dtype or "float32")
        most = self.overflow_share * torch.finfo(kind).max
        eight_bit = torch.finfo(kind).bits == 8  # of which only queries and keys are made, not their products
        sizes = history.get("entry" if eight_bit else "unscaled")
        if sizes is None or not (sizes[-1] > most).any():
            return None
        large = sizes[-1] > most
        head = int(np.nanargmax(sizes[-1]))
        value = float(sizes[-1, head])
        what = "an entry of its queries or keys" if eight_bit else "a score before scaling"
        name = self.dtype or dtype
        return _alarm(
            large, head, value, f"{what} is {value:.4g}, near the largest {name}, {most / self.overflow_share:.4g}"
        )


def predicted(values: np.ndarray, steps: Sequence[int], at: float) -> tuple[np.ndarray, np.ndarray]:
    """The lower end of the 95 % interval of ln(values) at a step, and the slope, of a straight line per column.

    −inf where there are fewer than 4 records, or values that are not above 0.
    """
    count, heads = values.shape
    none = np.full(heads, -np.inf), np.zeros(heads)
    if count < 4:
        return none
    good = ((values > 0) & np.isfinite(values)).all(0)
    logs = np.log(np.where(good, values, 1.0))
    x = np.asarray(steps, float)
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = centred @ logs / spread
    middle = logs.mean(0)
    left = logs - middle - np.outer(centred, slope)
    noise = np.sqrt(np.square(left).sum(0) / (count - 2))
    half = student(count - 2) * noise * math.sqrt(1 / count + (at - x.mean()) ** 2 / spread)
    return np.where(good, middle + slope * (at - x.mean()) - half, -np.inf), np.where(good, slope, 0.0)


def _alarm(heads: np.ndarray, head: int, value: float, why: str) -> dict[str, Any]:
    return {"heads": np.flatnonzero(heads).tolist(), "head": head, "value": value, "why": why}
