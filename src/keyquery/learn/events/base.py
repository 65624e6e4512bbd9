"""The predictions of EventModel, save and load."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int, Shaped
from torch import Tensor

from keyquery.learn.base import SavedEstimator, check_is_fitted, check_sizes, seed_of
from keyquery.learn.events.covariates import Described
from keyquery.learn.events.evaluation import EventEvaluation, Events, evaluated, sampled
from keyquery.learn.events.interactions import Interactions, interactions_of
from keyquery.learn.events.network import TIMES, EventNetwork, Mixture, following, log_ends
from keyquery.learn.events.windows import Clock, Windows, cut, ends
from keyquery.learn.inputs.event_streams import Stream, stream_of, times_per_group, unpacked, weights_of_events
from keyquery.learn.inputs.targets import classes_of, label_facts
from keyquery.learn.layers.time.attention import WAYS
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.devices import pick_device
from keyquery.support.progress import bars

SAVED = ("scale", "floor", "clock", "start", "log_gaps")


class EventEstimator(SavedEstimator):
    """The predictions of EventModel: all take the events so far, and `covariates` and `group_covariates` of `fit`."""

    time: str
    how: str
    information: str
    calendar: bool
    width: int
    depth: int
    heads: int
    window: int
    dropout: float
    batch_size: int
    device: Any
    verbose: bool
    network_: EventNetwork
    classes_: Shaped[np.ndarray, " classes"]
    scale_: float  # median of the positive inter-event times; the internal unit of time
    floor_: float  # inter-event times below this many units are not distinguished
    clock_: str
    start_: float | None  # origin of time, with `calendar`
    transitions_: Int[np.ndarray, "classes classes"]
    log_gaps_: tuple[float, float]  # mean and standard deviation of the log inter-event times
    described_: Described
    ends_: bool  # whether it was fitted with `ended`

    def predict_proba(
        self, events: Any, times: Any = None, groups: Any = None, at: Any = None, **described: Any
    ) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (groups, classes) of the type of the next event, if there is one, in the order of `classes_`.

        `at` are the times of the next events, with `information="target_time"`; `covariates` and `group_covariates` as
        in `fit`.
        """
        stream = self._stream(events, times, groups, **described)
        if self._targeted != (at is not None):
            fitted = f'this model was fitted with information="{self.params_["information"]}"'
            raise ValueError(f'at must hold a time for each group with information="target_time" only: {fitted}')
        when = stream.last if at is None else times_per_group("at", at, stream)
        logits, _ = self._last(stream, when)
        return logits[:, : len(self.classes_)].softmax(-1).cpu().numpy()

    def predict(self, *events: Any, **options: Any) -> Shaped[np.ndarray, " n"]:
        """Most probable next event of each group, in order of first appearance; arguments as in `predict_proba`."""
        probabilities = self.predict_proba(*events, **options)  # raises if not fitted
        return self.classes_[probabilities.argmax(1)]

    def predict_end(
        self, events: Any, times: Any = None, groups: Any = None, *, now: Any = None, **described: Any
    ) -> Float64[np.ndarray, " n"]:
        """Probability of each group that no event follows, given none until `now`; for models fitted with `ended`.

        With p after the last event and survival function S of inter-event times, p/(p + (1 − p)·S(now − last)).
        """
        logits, mixture, silence = self._next(events, times, groups, now, **described)
        if not self.ends_:
            raise ValueError("this EventModel does not know ends: fit it with ended=")
        end, more = log_ends(logits, len(self.classes_))
        return (end - torch.logaddexp(end, more + mixture.log_survival(silence))).exp().cpu().numpy()

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

        The "median", the "mean" or some `quantiles`, given that there was no event until `now`.
        """
        check_choice("what", what, ("median", "mean"))
        shares = [0.5] if quantiles is None else [float(share) for share in quantiles]
        if not all(0 < share < 1 for share in shares) or not shares:
            raise ValueError(f"quantiles must be between 0 and 1, got {shares}")
        _, mixture, silence = self._next(events, times, groups, now, **described)
        if what == "mean" and quantiles is None:
            return (mixture.average(silence) - silence).cpu().numpy() * self.scale_
        gaps = torch.stack([mixture.quantile(share, silence) - silence for share in shares], 1)
        return (gaps[:, 0] if quantiles is None else gaps).cpu().numpy() * self.scale_

    def score(self, *events: Any, **options: Any) -> float:
        """Accuracy on all events but the first of each group; arguments as in `evaluate`."""
        return self.evaluate(*events, **options).accuracy

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

        `random_state` is a seed; covariates of sampled events are unknown, and count as missing.
        """
        check_count("n", n, least=1)
        stream = self._stream(events, times, groups, **described)
        with bars(self.verbose) as progress:
            return sampled(self, stream, n, seed_of(random_state), progress)

    def interactions(
        self, events: Any, times: Any = None, groups: Any = None, lags: Any = None, **described: Any
    ) -> Interactions:
        """Which event types change the prediction of the next event, and at which lags.

        One event of each type in turn is inserted into some of these histories at each of the `lags` before now, in
        units of `times` (dates: seconds), and predictions are compared between types. Default lags: 16, from the
        shortest inter-event times to half the histories. It describes the model, and causes only without confounding.
        """
        stream = self._stream(events, times, groups, **described)
        return interactions_of(self, self._windows(stream), lags)

    @property
    def _targeted(self) -> bool:
        return bool(self.params_["information"] == "target_time")

    def _stream(
        self, events: Any, times: Any, groups: Any, covariates: Any = None, group_covariates: Any = None
    ) -> Stream:
        """The events of a prediction, sorted, with their covariates encoded as in training."""
        check_is_fitted(self)
        events, times, groups, covariates = unpacked(events, times, groups, covariates)
        stream = stream_of(events, times, groups)
        if stream.clock != self.clock_:
            raise ValueError(f"times must be {self.clock_}, as this model was fitted on, got {stream.clock}")
        inputs = self.described_.encode(covariates, group_covariates, stream)
        return replace(stream, types=self._codes(stream.types), inputs=inputs)

    def _codes(self, types: Shaped[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Class indices of the event types; −1, with a warning, for types that did not occur in training."""
        known = np.isin(types, self.classes_)
        if not known.all():
            unknown = np.unique(types[~known])
            listed = ", ".join(repr(label.item()) for label in unknown[:5]) + (", …" if len(unknown) > 5 else "")
            rows = f"{int((~known).sum())} of {len(known)} rows: {listed}; they count as an event of unknown type"
            warnings.warn(f"events hold types that did not occur in training, in {rows}", stacklevel=4)
        codes = np.full(len(known), -1, dtype=np.int64)
        codes[known] = np.searchsorted(self.classes_, types[known])
        return codes

    def _windows(self, stream: Stream) -> Windows:
        clock = Clock(self.scale_, self.start_)
        return cut(stream, clock, self.params_["window"], pick_device(self.device))[0]

    @torch.no_grad()
    def _last(self, stream: Stream, when: Float64[np.ndarray, " groups"]) -> tuple[Tensor, Mixture]:
        """Logits (groups, types) of the next event of each group at time `when`, and the inter-event time."""
        device, clock = pick_device(self.device), Clock(self.scale_, self.start_)
        windows = ends(stream, clock, self.params_["window"], device)
        since = torch.from_numpy((when - clock.begin(stream)) / self.scale_).to(device).unsqueeze(1)
        network, logits, gaps = self.network_.to(device).eval(), [], []
        for part in torch.arange(len(stream.groups), device=device).split(4 * self.batch_size):
            batch = windows.take(part)
            batch = batch._replace(next_times=since[part].where(batch.counted, batch.next_times))
            batch_logits, mixture = following(network, batch)  # with `ended`, the last logit is the end
            logits.append(batch_logits.double())
            gaps.append(mixture)
        return torch.cat(logits), Mixture.join(gaps)

    def _next(
        self, events: Any, times: Any, groups: Any, now: Any, **described: Any
    ) -> tuple[Tensor, Mixture, Float64[Tensor, " groups"]]:
        """As `_last`, and how long groups have been silent `now`, in units of the median gap."""
        stream = self._stream(events, times, groups, **described)
        # The inter-event time is predicted by a token that does not see the time of the next event: any time will do.
        logits, mixture = self._last(stream, stream.last)
        silence = np.zeros(len(stream.groups)) if now is None else times_per_group("now", now, stream) - stream.last
        return logits, mixture, torch.from_numpy(silence / self.scale_).to(logits.device)

    def _network(self, types: int, floor: float, **further: Any) -> EventNetwork:
        shape, targeted = (types, self.width, self.depth, self.heads), self.information == "target_time"
        return EventNetwork(*shape, self.time, self.how, self.dropout, targeted, self.calendar, floor, **further)

    def _check(self) -> None:
        check_choice("time", self.time, TIMES)
        check_choice("how", self.how, WAYS)
        check_choice("information", self.information, ("past", "target_time"))
        if self.time == "positions" and self.information == "target_time":
            raise ValueError('information="target_time" needs times, which time="positions" does not use')
        sizes = ("width", "depth", "heads", "epochs", "batch_size", "patience")
        check_sizes(self, sizes, gap_weight=math.inf, lr=math.inf, dropout=1, validation_fraction=1)
        check_count("window", self.window, least=2)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        facts = {name: getattr(self, f"{name}_") for name in SAVED} | {"classes": label_facts(self.classes_)}
        facts |= {"covariates": self.described_.facts(), "ends": self.ends_}
        return facts, {"transitions": torch.from_numpy(self.transitions_)}

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], EventNetwork], int]:
        self.classes_, self.transitions_ = classes_of(facts["classes"]), tensors.pop("transitions").numpy()
        self.scale_, self.floor_, self.clock_, self.start_, self.log_gaps_ = (facts[name] for name in SAVED)
        self.described_, self.ends_ = Described.of_facts(facts["covariates"]), bool(facts["ends"])
        mean, deviation = self.log_gaps_
        for name, value in (("scale", self.scale_), ("floor", self.floor_), ("deviation of log_gaps", deviation)):
            check_number(name, value)
            if value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        check_number("mean of log_gaps", mean)
        check_number("start", self.start_ or 0.0)
        check_choice("clock", self.clock_, ("numbers", "dates", "spans"))
        count, counts = len(self.classes_), self.transitions_
        if counts.shape != (count, count) or counts.dtype.kind != "i" or np.any(counts < 0):
            received = f"{counts.dtype} of shape {counts.shape}"
            raise ValueError(f"transitions must be non-negative counts, ({count}, {count}), got {received}")
        inputs, floor, ended = self.described_.size, self.floor_, self.ends_
        return lambda: self._network(count, floor, inputs=inputs, ends=ended), self.depth
