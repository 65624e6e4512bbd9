"""EventModel: prediction of the next event and its time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from keyquery.capture.load import pick_device
from keyquery.estimators.base import check_is_fitted, seed_of, seeded
from keyquery.estimators.events.base import EventEstimator
from keyquery.estimators.events.evaluation import EventEvaluation, counted, transitions
from keyquery.estimators.events.interactions import Interactions, checked_lags, compare, contexts_of, usual_lags
from keyquery.estimators.events.mixture import Mixture
from keyquery.estimators.events.sampling import Events, sampled
from keyquery.estimators.events.training import Censored, following, judged, learn
from keyquery.estimators.events.windows import Batch, Clock, cut, ends
from keyquery.estimators.inputs.event_streams import learnable, stream_of
from keyquery.estimators.inputs.targets import label_facts
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import bars


class EventModel(EventEstimator):
    """Continuous-time event model: predicts the type and the time of the next event of each group.

    Events are three columns of equal length, in any order of rows: `events` (types), `times` (numbers or dates) and
    `groups` (such as a user; None: one group). The loss is

        cross-entropy of the next type − `gap_weight` · log-likelihood of the inter-event time,

    where inter-event times follow a mixture of log-normals.

    Parameters
    ----------
    time
        Time encoding: "mercer" or "bochner", through `kq.TimeAttention`, or "positions", which uses the order of
        events but not their times. Default: "mercer".
    how
        How time enters the scores, as in `kq.TimeAttention`. Default: "concatenated".
    information
        "past": the next event is predicted from the past only. "target_time": its type is predicted given its time,
        as in published work; metrics of the two are not comparable. Default: "past".
    unknown
        Types that did not occur in training: "other", the average of all types, with a warning, or "refuse".
        Default: "other".
    calendar
        Measure time from the earliest training event, not from the start of the window, so that the model can use
        seasons and dates. Default: False.
    width, depth, heads
        Size of the transformer. Default: 32, 1, 2.
    window
        Number of past events that are used. Default: 80.
    dropout
        Default: 0.1.
    gap_weight
        Weight of the inter-event times in the loss. Default: 1.
    epochs, batch_size, lr
        Default: 60, 32, 2e-3.
    validation_fraction
        Share of the groups used as the validation split. Default: 0.1.
    patience
        Epochs without improvement before training stops. Default: 5.
    random_state
        Seed: None, an integer or a numpy generator. Default: None.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere a line per epoch. Default: False.

    See Also
    --------
    kq.TimeAttention : the layer.
    kq.MercerTime, kq.BochnerTime : time encodings.

    Examples
    --------
    >>> types, gaps = np.array(["tick", "tock"] * 60), np.array([1.0, 3.0] * 60)
    >>> when, who = gaps.cumsum() - gaps, np.repeat(["left", "right"], 60)
    >>> model = kq.EventModel(width=16, window=10, epochs=30, validation_fraction=0, random_state=0, device="cpu")
    >>> model.fit(types, when, who).predict(types[:61], when[:61], who[:61])
    array(['tick', 'tock'], dtype='<U4')
    """

    def __init__(
        self,
        time: str = "mercer",
        how: str = "concatenated",
        information: str = "past",
        calendar: bool = False,
        width: int = 32,
        depth: int = 1,
        heads: int = 2,
        window: int = 80,
        dropout: float = 0.1,
        gap_weight: float = 1.0,
        epochs: int = 60,
        batch_size: int = 32,
        lr: float = 2e-3,
        validation_fraction: float = 0.1,
        patience: int = 5,
        random_state: Any = None,
        device: str = "auto",
        verbose: bool = False,
        unknown: str = "other",
    ) -> None:
        self.time, self.how, self.information, self.calendar = time, how, information, calendar
        self.width, self.depth, self.heads, self.window = width, depth, heads, window
        self.dropout, self.gap_weight = dropout, gap_weight
        self.epochs, self.batch_size, self.lr = epochs, batch_size, lr
        self.validation_fraction, self.patience = validation_fraction, patience
        self.random_state, self.device, self.verbose = random_state, device, verbose
        self.unknown = unknown

    def fit(
        self, events: Any, times: Any = None, groups: Any = None, *, strict: bool = False, until: Any = None
    ) -> EventModel:
        """Fit to columns of types, times and groups; Ctrl-C ends training and keeps the best epoch.

        Parameters
        ----------
        events, times, groups
            Columns, or a data frame of these columns in this order.
        strict
            Raise where times decrease within a group. Default: sort them, with a warning.
        until
            Time up to which groups were observed, one or one per group in order of first appearance: that no event
            followed the last one (censoring) is then part of the likelihood. Default: none.

        Returns
        -------
        EventModel
            The fitted estimator.
        """
        self._check()
        device, seed = pick_device(self.device), seed_of(self.random_state)
        stream = stream_of(events, times, groups, strict)
        classes, codes = np.unique(stream.types, return_inverse=True)
        gaps = learnable(stream)
        scale = float(np.median(gaps[gaps > 0]))
        floor = float(min(gaps[gaps > 0].min() / scale / 2, 1e-3))
        clock = Clock(scale, float(stream.times.min()) if self.calendar else None)
        observed = None if until is None else (self._per_group("until", until, stream) - stream.last) / scale
        windows, owners = cut(stream, codes, clock, self.window, device)
        censored = None
        if observed is not None:
            last = ends(stream, codes, clock, self.window, device)
            censored = Censored(last, torch.from_numpy(observed).to(device), np.arange(len(observed)))
        pairs = codes[:-1][stream.inside], codes[1:][stream.inside]
        counts = transitions(*pairs, len(classes))
        logs = np.log(np.maximum(gaps / scale, floor))
        with seeded(seed, device):
            network = self._network(len(classes), floor).to(device)
            network.begin(counts.sum(0).astype(np.float64), gaps / scale, windows)
            sizes: dict[str, Any] = {
                "size": self.batch_size,
                "epochs": self.epochs,
                "lr": self.lr,
                "patience": self.patience,
            }
            options: dict[str, Any] = {"validation_fraction": self.validation_fraction, "gap_weight": self.gap_weight}
            options |= {"seed": seed, "censored": censored, "verbose": self.verbose}
            with bars(self.verbose) as progress:
                history = learn(network, windows, owners, **sizes, **options, progress=progress)
        self.network_, self.classes_, self.scale_, self.floor_ = network, classes, scale, floor
        self.start_, self.params_ = clock.start, self._plain_params()
        self.clock_, self.transitions_, self.history_ = stream.clock, counts, history
        self.log_gaps_ = float(logs.mean()), float(max(logs.std(), 0.05))
        self.contexts_ = contexts_of(windows, self.window - 1, seed)
        self.seen_ = {
            "events": len(codes),
            "groups": len(stream.groups),
            "groups of one event": int((stream.lengths == 1).sum()),  # no next event to train on
            "sorted": stream.moved,
            "gaps of 0": int((gaps == 0).sum()),
            "windows": len(owners),
        }
        return self

    def predict_proba(
        self, events: Any, times: Any = None, groups: Any = None, at: Any = None
    ) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (groups, classes) of the next event of each group, in the order of `classes_`.

        Parameters
        ----------
        events, times, groups
            The history of each group.
        at
            Time of the predicted event of each group: required with `information="target_time"`, else not allowed.

        Returns
        -------
        ndarray
            One row per group, in order of first appearance.
        """
        stream = self._stream(events, times, groups)
        logits, _ = self._last(stream, self._moments(stream, at))
        return logits.softmax(-1).cpu().numpy()

    def predict(self, events: Any, times: Any = None, groups: Any = None, at: Any = None) -> Shaped[np.ndarray, " n"]:
        """Most probable next event of each group; groups in order of first appearance.

        Parameters
        ----------
        events, times, groups
            The history of each group.
        at
            As in `predict_proba`.

        Returns
        -------
        ndarray
            Event types (groups,).
        """
        probabilities = self.predict_proba(events, times, groups, at)
        return self.classes_[probabilities.argmax(1)]

    def predict_time(
        self,
        events: Any,
        times: Any = None,
        groups: Any = None,
        what: str = "median",
        *,
        now: Any = None,
        quantiles: Sequence[float] | None = None,
    ) -> Float64[np.ndarray, "groups ..."]:
        """Predicted time to the next event of each group, in units of `times` (dates: seconds).

        Parameters
        ----------
        events, times, groups
            The history of each group.
        what
            "median" or "mean". Default: "median".
        now
            The present, one time or one per group: no event has followed the last one so far, and times count from
            now. Default: the last event of each group.
        quantiles
            Shares, such as (0.1, 0.5, 0.9); returns a column for each instead of `what`. Default: none.

        Returns
        -------
        ndarray
            One value, or one per quantile, for each group.
        """
        check_choice("what", what, ("median", "mean"))
        shares = [0.5] if quantiles is None else [float(share) for share in quantiles]
        if not all(0 < share < 1 for share in shares) or not shares:
            raise ValueError(f"quantiles must be between 0 and 1, got {shares}")
        stream = self._stream(events, times, groups)
        silent = np.zeros(len(stream.groups)) if now is None else self._per_group("now", now, stream) - stream.last
        # The inter-event time is predicted by a token that does not see the time of the next event: any time will do.
        _, mixture = self._last(stream, stream.last)
        after = torch.from_numpy(silent / self.scale_).to(mixture.mean.device)
        if what == "mean" and quantiles is None:
            return (mixture.average(after) - after).cpu().numpy() * self.scale_
        gaps = torch.stack([mixture.quantile(share, after) - after for share in shares], 1).cpu().numpy() * self.scale_
        return gaps[:, 0] if quantiles is None else gaps

    def score(self, events: Any, times: Any = None, groups: Any = None) -> float:
        """Accuracy of next-event prediction, over all events but the first of each group.

        Parameters
        ----------
        events, times, groups
            The events.

        Returns
        -------
        float
            Share of events.
        """
        return self.evaluate(events, times, groups).accuracy

    def evaluate(self, events: Any, times: Any = None, groups: Any = None) -> EventEvaluation:
        """Evaluate next-event prediction on all events but the first of each group.

        The model is compared to two baselines from counts of its training data, "majority" and "Markov".

        Parameters
        ----------
        events, times, groups
            The events.

        Returns
        -------
        EventEvaluation
            A Reading with a row per model.
        """
        stream = self._stream(events, times, groups)
        codes = self._codes(stream)
        if len(stream.gaps) == 0:
            raise ValueError("no group has a second event: there is nothing to predict")
        if not (codes[1:][stream.inside] >= 0).any():
            raise ValueError("no event that follows another is of a type that occurred in training")
        windows = self._windows(stream, codes)
        network = self.network_.to(windows.starts.device)
        known = self.params_["information"]
        row = {"by": self.params_["time"], "information": known, **judged(network, windows, 4 * self.batch_size)}
        pairs = codes[:-1][stream.inside], codes[1:][stream.inside], stream.gaps / self.scale_
        known_next = pairs[1] >= 0
        rows = [row, *counted(self.transitions_, self.log_gaps_, self.floor_, *(part[known_next] for part in pairs))]
        for each in rows:  # an unknown type cannot be predicted: an error
            each["accuracy"] *= float(known_next.mean())
        return EventEvaluation(
            information=known,
            events=len(stream.gaps),
            firsts=len(stream.groups),
            rows=rows,
            unknown=int((~known_next).sum()),
            provenance=provenance(
                tensors=digests(self.network_.state_dict()), estimator=repr(type(self)(**self.params_))
            ),
        )

    def sample(
        self, events: Any, times: Any = None, groups: Any = None, n: int = 10, random_state: Any = None
    ) -> Events:
        """Sample the next n events of each group; columns, group after group.

        Parameters
        ----------
        events, times, groups
            The events.
        n
            Events per group.
        random_state
            Seed. Default: random.

        Returns
        -------
        Events
            Columns of types, times and groups.
        """
        check_count("n", n, least=1)
        return sampled(self, self._stream(events, times, groups), n, seed_of(random_state))

    def interactions(self, events: Any = None, times: Any = None, groups: Any = None, lags: Any = None) -> Interactions:
        """Which event types change the prediction of the next event, and at which lags.

        One event is inserted into real histories at each lag before now, of each type in turn, and the predictions are
        compared between types. This describes the model; it is causal in the data only without confounding.

        Parameters
        ----------
        events, times, groups
            The histories. Default: a few training histories that were kept.
        lags
            In units of `times` (dates: seconds). Default: 16, from the shortest inter-event times to the length of
            half of the histories.

        Returns
        -------
        Interactions
            A Reading; `.plot()` draws it.
        """
        check_is_fitted(self)
        device, targeted = pick_device(self.device), self._targeted
        contexts = self.contexts_
        if events is not None:
            stream = self._stream(events, times, groups)
            contexts = contexts_of(self._windows(stream, self._codes(stream)), self.params_["window"] - 1, 0)
        contexts = [context for context in contexts if context.reach(targeted) > 0]
        if not contexts:
            raise ValueError("there are no histories to compare: pass events, times and groups")
        chosen = usual_lags(contexts, targeted) if lags is None else checked_lags(lags) / self.scale_
        network = self.network_.to(device).eval()

        @torch.no_grad()
        def predict(batch: Batch) -> tuple[Tensor, Mixture]:
            return following(network, batch)

        with bars(self.verbose) as progress:
            effects = compare(predict, contexts, chosen, len(self.classes_), targeted, device, progress)
        return Interactions(
            types=label_facts(self.classes_)["labels"],
            lags=(chosen * self.scale_).tolist(),
            clock=self.clock_,
            information=self.params_["information"],
            provenance=provenance(
                tensors=digests(self.network_.state_dict()), estimator=repr(type(self)(**self.params_))
            ),
            **effects,
        )

    def save(self, path: str | Path, contexts: bool = True) -> None:
        """Write the fitted model, everything that prediction needs, to one safetensors file.

        Parameters
        ----------
        path
            The file.
        contexts
            Whether to include the few training histories that `interactions()` uses.
        """
        check_is_fitted(self)
        self._write(path, *self._saved(contexts))
