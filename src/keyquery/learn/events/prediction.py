"""Predictions of a fitted EventModel: the type and the time of the next event, and whether there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped

from keyquery.learn.events.base import EventEstimator
from keyquery.learn.events.lasts import log_ends
from keyquery.support.checks import check_choice


class EventPredictor(EventEstimator):
    """The predictions of EventModel."""

    def predict_proba(
        self,
        events: Any,
        times: Any = None,
        groups: Any = None,
        at: Any = None,
        *,
        covariates: Any = None,
        group_covariates: Any = None,
    ) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (groups, classes) of the type of the next event, if there is one, in the order of
        `classes_`.
        """
        stream = self._stream(events, times, groups, covariates, group_covariates)
        logits, _ = self._last(stream, self._moments(stream, at))
        return logits[:, : len(self.classes_)].softmax(-1).cpu().numpy()

    def predict(
        self,
        events: Any,
        times: Any = None,
        groups: Any = None,
        at: Any = None,
        *,
        covariates: Any = None,
        group_covariates: Any = None,
    ) -> Shaped[np.ndarray, " n"]:
        """Most probable next event of each group; groups in order of first appearance."""
        described = {"covariates": covariates, "group_covariates": group_covariates}
        probabilities = self.predict_proba(events, times, groups, at, **described)
        return self.classes_[probabilities.argmax(1)]

    def predict_end(
        self,
        events: Any,
        times: Any = None,
        groups: Any = None,
        *,
        now: Any = None,
        covariates: Any = None,
        group_covariates: Any = None,
    ) -> Float64[np.ndarray, " n"]:
        """Probability of each group that no event follows; for models fitted with `ended`.

        With p after the last event and survival function S of inter-event times, p/(p + (1 − p)·S(now − last)).
        """
        stream = self._stream(events, times, groups, covariates, group_covariates)
        if not self.ends_:
            raise ValueError("this EventModel does not know ends: fit it with ended=")
        logits, mixture = self._last(stream, stream.last)
        end, more = log_ends(logits, len(self.classes_)) or (logits, logits)
        silent = mixture.log_survival(self._silent(stream, now).to(mixture.mean.device))
        return (end - torch.logaddexp(end, more + silent)).exp().cpu().numpy()

    def predict_time(
        self,
        events: Any,
        times: Any = None,
        groups: Any = None,
        what: str = "median",
        *,
        now: Any = None,
        quantiles: Sequence[float] | None = None,
        covariates: Any = None,
        group_covariates: Any = None,
    ) -> Float64[np.ndarray, "groups ..."]:
        """Predicted time to the next event of each group, if there is one, in units of `times` (dates: seconds)."""
        check_choice("what", what, ("median", "mean"))
        shares = [0.5] if quantiles is None else [float(share) for share in quantiles]
        if not all(0 < share < 1 for share in shares) or not shares:
            raise ValueError(f"quantiles must be between 0 and 1, got {shares}")
        stream = self._stream(events, times, groups, covariates, group_covariates)
        # The inter-event time is predicted by a token that does not see the time of the next event: any time will do.
        _, mixture = self._last(stream, stream.last)
        after = self._silent(stream, now).to(mixture.mean.device)
        if what == "mean" and quantiles is None:
            return (mixture.average(after) - after).cpu().numpy() * self.scale_
        gaps = torch.stack([mixture.quantile(share, after) - after for share in shares], 1).cpu().numpy() * self.scale_
        return gaps[:, 0] if quantiles is None else gaps
