"""Predictions of a fitted EventModel: the next event, its time, whether there is one, and what they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped

from keyquery.learn.base import check_is_fitted, seed_of
from keyquery.learn.events.base import EventEstimator
from keyquery.learn.events.evaluation import EventEvaluation, Events, evaluated, sampled
from keyquery.learn.events.interactions import Interactions, contexts_of, interactions_of
from keyquery.learn.events.losses import log_ends
from keyquery.learn.inputs.event_streams import weights_of_events
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import bars


class EventPredictor(EventEstimator):
    """The predictions of EventModel: all take the events so far, and `covariates` and `group_covariates` of `fit`."""

    def predict_proba(
        self, events: Any, times: Any = None, groups: Any = None, at: Any = None, **described: Any
    ) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (groups, classes) of the type of the next event, if there is one, in the order of `classes_`.

        `at` are the times of the next events, with `information="target_time"`; `covariates` and `group_covariates` as
        in `fit`.
        """
        stream = self._stream(events, times, groups, **described)
        logits, _ = self._last(stream, self._moments(stream, at))
        return logits[:, : len(self.classes_)].softmax(-1).cpu().numpy()

    def predict(
        self, events: Any, times: Any = None, groups: Any = None, at: Any = None, **described: Any
    ) -> Shaped[np.ndarray, " n"]:
        """Most probable next event of each group, in order of first appearance; arguments as in `predict_proba`."""
        probabilities = self.predict_proba(events, times, groups, at, **described)  # raises if not fitted
        return self.classes_[probabilities.argmax(1)]

    def predict_end(
        self, events: Any, times: Any = None, groups: Any = None, *, now: Any = None, **described: Any
    ) -> Float64[np.ndarray, " n"]:
        """Probability of each group that no event follows, given none until `now`; for models fitted with `ended`.

        With p after the last event and survival function S of inter-event times, p/(p + (1 − p)·S(now − last)).
        `covariates` and `group_covariates` as in `fit`.
        """
        stream = self._stream(events, times, groups, **described)
        if not self.ends_:
            raise ValueError("this EventModel does not know ends: fit it with ended=")
        logits, mixture = self._last(stream, stream.last)
        end, more = log_ends(logits, len(self.classes_)) or (logits, logits)
        silence = mixture.log_survival(self._silent(stream, now).to(mixture.mean.device))
        return (end - torch.logaddexp(end, more + silence)).exp().cpu().numpy()

    def predict_time(
        self,
        events: Any,
        times: Any = None,
        groups: Any = None,
        what: str = "median",
        *,
        now: Any = None,
        quantiles: Sequence[float] | None = None,
        **described: Any,
    ) -> Float64[np.ndarray, "groups ..."]:
        """Predicted time to the next event of each group, if there is one, in units of `times` (dates: seconds).

        The "median", the "mean" or some `quantiles`, given that there was no event until `now`; `covariates` and
        `group_covariates` as in `fit`.
        """
        check_choice("what", what, ("median", "mean"))
        shares = [0.5] if quantiles is None else [float(share) for share in quantiles]
        if not all(0 < share < 1 for share in shares) or not shares:
            raise ValueError(f"quantiles must be between 0 and 1, got {shares}")
        stream = self._stream(events, times, groups, **described)
        # The inter-event time is predicted by a token that does not see the time of the next event: any time will do.
        _, mixture = self._last(stream, stream.last)
        after = self._silent(stream, now).to(mixture.mean.device)
        if what == "mean" and quantiles is None:
            return (mixture.average(after) - after).cpu().numpy() * self.scale_
        gaps = torch.stack([mixture.quantile(share, after) - after for share in shares], 1).cpu().numpy() * self.scale_
        return gaps[:, 0] if quantiles is None else gaps

    def score(
        self, events: Any, times: Any = None, groups: Any = None, *, sample_weight: Any = None, **described: Any
    ) -> float:
        """Accuracy of next-event prediction, over all events but the first of each group; arguments as in `fit`."""
        return self.evaluate(events, times, groups, sample_weight=sample_weight, **described).accuracy

    def evaluate(
        self, events: Any, times: Any = None, groups: Any = None, *, sample_weight: Any = None, **described: Any
    ) -> EventEvaluation:
        """Evaluate next-event prediction on all events but the first of each group; arguments as in `fit`.

        The model is compared to two baselines from counts of its training data, "majority" and "Markov".
        """
        stream = self._stream(events, times, groups, **described)
        return evaluated(self, replace(stream, weights=weights_of_events(stream, sample_weight)))

    def sample(
        self,
        events: Any,
        times: Any = None,
        groups: Any = None,
        n: int = 10,
        random_state: Any = None,
        **described: Any,
    ) -> Events:
        """Sample the next n events of each group, fewer where it ends; columns, group after group.

        `random_state` is a seed; `covariates` and `group_covariates` as in `fit`: those of sampled events are unknown,
        and count as missing.
        """
        check_count("n", n, least=1)
        stream = self._stream(events, times, groups, **described)
        with bars(self.verbose) as progress:
            return sampled(self, stream, n, seed_of(random_state), progress)

    def interactions(
        self, events: Any = None, times: Any = None, groups: Any = None, lags: Any = None, **described: Any
    ) -> Interactions:
        """Which event types change the prediction of the next event, and at which lags.

        One event is inserted into real histories (default: a few training histories that were kept) at each of the
        `lags` before now, in units of `times` (dates: seconds), of each type in turn, and the predictions are compared
        between types. Default lags: 16, from the shortest inter-event times to the length of half of the histories.
        This describes the model; it is causal in the data only without confounding. The Reading's `plot()` draws it.
        """
        check_is_fitted(self)
        contexts = self.contexts_
        if events is not None:
            stream = self._stream(events, times, groups, **described)
            windows = self._windows(stream, self._codes(stream))
            contexts = contexts_of(windows, self.params_["window"] - 1, 0, self.described_)
        return interactions_of(self, contexts, lags)

    def save(self, path: str | Path, contexts: bool = True) -> None:
        """Write everything that prediction needs to one safetensors file, and `contexts` of `interactions()` too."""
        check_is_fitted(self)
        self._write(path, *self._saved(contexts))
