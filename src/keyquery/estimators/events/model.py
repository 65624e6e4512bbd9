"""EventModel: timed events in, the next event and the time to it out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int, Shaped
from torch import Tensor

from keyquery.capture.load import pick_device
from keyquery.estimators.base import (
    Estimator,
    check_sizes,
    classes_of,
    filled,
    label_facts,
    read_fitted,
    seed_of,
    seeded,
    write_fitted,
)
from keyquery.estimators.events.evaluation import EventEvaluation, counted, transitions
from keyquery.estimators.events.interactions import (
    Context,
    Interactions,
    checked_lags,
    compare,
    context_tensors,
    contexts_of,
    take_contexts,
    usual_lags,
)
from keyquery.estimators.events.mixture import Mixture
from keyquery.estimators.events.network import TIMES, EventNetwork
from keyquery.estimators.events.saved_facts import check_facts
from keyquery.estimators.events.training import following, judged, learn
from keyquery.estimators.events.windows import Batch, Clock, Windows, cut, ends
from keyquery.estimators.inputs.columns import times_of, told
from keyquery.estimators.inputs.event_streams import Stream, learnable, longer, stream_of
from keyquery.layers.time.attention import WAYS
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import bars

INFORMATION = ("past", "target_time")


class Events(NamedTuple):
    """Columns of one length."""

    events: Shaped[np.ndarray, " n"]
    times: Shaped[np.ndarray, " n"]
    groups: Shaped[np.ndarray, " n"]


class EventModel(Estimator):
    """The next event of each group, and the time to it, from the types and times of the events before.

    Events come as three columns of equal length, in any order of rows: `events` (types), `times` (numbers, or dates)
    and `groups` (who, or where; None: all are of one). `time` is "mercer" or "bochner", through `kq.TimeAttention`
    with its `how`, or "positions", which knows the order of events and not their times. At most `window` events before
    are seen. The loss is the cross-entropy of the next type plus `gap_weight` times the −log-likelihood of the gap
    under a mixture of log-normals. `holdout` of the groups, whole ones, are kept from training.

    With `information="past"` nothing of the event to foretell is known. With "target_time" its type is foretold at a
    time that is given, as published work does: figures of the two do not compare. Time is counted from the first event
    of the window; with `calendar` from the earliest of training, so that seasons and dates are seen.

    >>> types, gaps = np.array(["tick", "tock"] * 60), np.array([1.0, 3.0] * 60)
    >>> when, who = gaps.cumsum() - gaps, np.repeat(["left", "right"], 60)
    >>> model = kq.EventModel(width=16, heads=2, window=10, epochs=30, holdout=0, random_state=0, device="cpu")
    >>> model.fit(types, when, who).predict(types[:61], when[:61], who[:61])
    array(['tick', 'tock'], dtype='<U4')
    """

    network_: EventNetwork
    classes_: Shaped[np.ndarray, " classes"]
    scale_: float  # the median of the gaps above 0, the unit of time within
    floor_: float  # gaps of so many units or fewer are told from each other no more
    clock_: str
    start_: float | None  # with `calendar`, when time begins
    transitions_: Int[np.ndarray, "classes classes"]
    log_gaps_: tuple[float, float]  # mean and spread of their logarithms
    contexts_: list[Context]
    seen_: dict[str, int]
    history_: list[dict[str, float]]

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
        epochs: int = 20,
        batch_size: int = 32,
        lr: float = 2e-3,
        holdout: float = 0.1,
        patience: int = 5,
        random_state: Any = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.time, self.how, self.information, self.calendar = time, how, information, calendar
        self.width, self.depth, self.heads, self.window = width, depth, heads, window
        self.dropout, self.gap_weight = dropout, gap_weight
        self.epochs, self.batch_size, self.lr = epochs, batch_size, lr
        self.holdout, self.patience = holdout, patience
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def fit(self, events: Any, times: Any, groups: Any = None, *, strict: bool = False) -> EventModel:
        """Learn from columns of types, times and groups. Times that decrease within a group are sorted with a warning,
        or with `strict` refused."""
        self._check()
        device, seed = pick_device(self.device), seed_of(self.random_state)
        stream = stream_of(events, times, groups, strict)
        classes, codes = np.unique(stream.types, return_inverse=True)
        gaps = learnable(stream, classes)
        scale = float(np.median(gaps[gaps > 0]))
        floor = float(min(gaps[gaps > 0].min() / scale / 2, 1e-3))
        clock = Clock(scale, float(stream.times.min()) if self.calendar else None)
        windows, owners = cut(stream, codes, clock, self.window, device)
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
            given: dict[str, Any] = {"holdout": self.holdout, "gap_weight": self.gap_weight, "seed": seed}
            with bars(self.verbose) as progress:
                history = learn(network, windows, owners, **sizes, **given, progress=progress)
        self.network_, self.classes_, self.scale_, self.floor_ = network, classes, scale, floor
        self.start_, self.params_ = clock.start, self._plain_params()
        self.clock_, self.transitions_, self.history_ = stream.clock, counts, history
        self.log_gaps_ = float(logs.mean()), float(max(logs.std(), 0.05))
        self.contexts_ = contexts_of(windows, self.window - 1, seed)
        self.seen_ = {
            "events": len(codes),
            "groups": len(stream.groups),
            "groups of one event": int((stream.lengths == 1).sum()),  # from which nothing can be learned
            "sorted": stream.moved,
            "gaps of 0": int((gaps == 0).sum()),
            "windows": len(owners),
        }
        return self

    def predict_proba(
        self, events: Any, times: Any, groups: Any = None, at: Any = None
    ) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (groups, classes) of the event that follows each group's last, in the order of `classes_`.

        Groups stand in the order in which they first appear. `at` holds for each the time of the event to foretell,
        with `information="target_time"` only.
        """
        stream = self._stream(events, times, groups)
        logits, _ = self._last(stream, self._moments(stream, at))
        return logits.softmax(-1).cpu().numpy()

    def predict(self, events: Any, times: Any, groups: Any = None, at: Any = None) -> Shaped[np.ndarray, " n"]:
        """The likeliest event to follow each group's last; groups in the order in which they first appear."""
        found = self.predict_proba(events, times, groups, at)
        return self.classes_[found.argmax(1)]

    def predict_time(
        self, events: Any, times: Any, groups: Any = None, what: str = "median"
    ) -> Float64[np.ndarray, " n"]:
        """The "median" or "mean" time from each group's last event to the next, in units of times, of dates seconds."""
        check_choice("what", what, ("median", "mean"))
        stream = self._stream(events, times, groups)
        # The gap is told by a token that does not see when the next event comes: any time does.
        _, mixture = self._last(stream, stream.last)
        found = mixture.quantile() if what == "median" else mixture.average()
        return found.double().cpu().numpy() * self.scale_

    def score(self, events: Any, times: Any, groups: Any = None) -> float:
        """The share of events, but the first of each group, whose type is foretold from those before."""
        return self.evaluate(events, times, groups).accuracy

    def evaluate(self, events: Any, times: Any, groups: Any = None) -> EventEvaluation:
        """Every event but the first of its group, foretold from those before: the model beside counts of its training
        data, "majority" and "Markov"."""
        stream = self._stream(events, times, groups)
        codes = self._codes(stream)
        if len(stream.gaps) == 0:
            raise ValueError("no group has a second event: there is nothing to foretell")
        windows = self._windows(stream, codes)
        network = self.network_.to(windows.starts.device)
        known = self.params_["information"]
        found = {"by": self.params_["time"], "information": known, **judged(network, windows, 4 * self.batch_size)}
        pairs = codes[:-1][stream.inside], codes[1:][stream.inside], stream.gaps / self.scale_
        return EventEvaluation(
            information=known,
            events=len(stream.gaps),
            firsts=len(stream.groups),
            rows=[found, *counted(self.transitions_, self.log_gaps_, self.floor_, *pairs)],
            provenance=provenance(
                tensors=digests(self.network_.state_dict()), estimator=repr(type(self)(**self.params_))
            ),
        )

    def sample(self, events: Any, times: Any, groups: Any = None, n: int = 10, random_state: Any = None) -> Events:
        """Each group continued by n events that are drawn, as columns, group after group."""
        check_count("n", n, least=1)
        stream = self._stream(events, times, groups)
        generator = torch.Generator().manual_seed(seed_of(random_state))
        codes = self._codes(stream)
        drawn_codes, drawn_times = [], []
        for _ in range(n):
            logits, mixture = self._last(stream, stream.last, codes)
            gap = mixture.draw(generator).double().cpu().numpy() * self.scale_
            when = stream.last + gap
            if self._targeted:
                logits, _ = self._last(stream, when, codes)
            kind = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).squeeze(1).numpy()
            stream, codes = longer(stream, codes, kind, when)
            drawn_codes.append(kind)
            drawn_times.append(when)
        found = told(np.stack(drawn_times, 1).ravel(), self.clock_)
        return Events(self.classes_[np.stack(drawn_codes, 1).ravel()], found, np.repeat(stream.groups, n))

    def interactions(self, events: Any = None, times: Any = None, groups: Any = None, lags: Any = None) -> Interactions:
        """Which types of events change what comes next, and at which lags.

        Into real histories, those given or a few that were kept from training, one event more is put at each lag before
        now, of each type in turn, and what the model foretells is compared among types: see `Interactions`. It is
        what the model has learned, and a cause in the data only where nothing else explains it. `lags` are in the
        units of times, of dates seconds; None: 16 between the shortest gaps and the length of half of the histories.
        """
        self._check_fitted()
        device, targeted = pick_device(self.device), self._targeted
        contexts = self.contexts_
        if events is not None:
            stream = self._stream(events, times, groups)
            contexts = contexts_of(self._windows(stream, self._codes(stream)), self.params_["window"] - 1, 0)
        contexts = [context for context in contexts if context.reach(targeted) > 0]
        if not contexts:
            raise ValueError("there is no history to ask about: give events, times and groups")
        chosen = usual_lags(contexts, targeted) if lags is None else checked_lags(lags) / self.scale_
        network = self.network_.to(device).eval()

        @torch.no_grad()
        def foretell(batch: Batch) -> tuple[Tensor, Mixture]:
            return following(network, batch)

        with bars(self.verbose) as progress:
            found = compare(foretell, contexts, chosen, len(self.classes_), targeted, device, progress)
        return Interactions(
            types=label_facts(self.classes_)["labels"],
            lags=(chosen * self.scale_).tolist(),
            clock=self.clock_,
            information=self.params_["information"],
            provenance=provenance(
                tensors=digests(self.network_.state_dict()), estimator=repr(type(self)(**self.params_))
            ),
            **found,
        )

    def save(self, path: str | Path, contexts: bool = True) -> None:
        """Write everything that foretelling needs into one safetensors file.

        It holds the few histories that `interactions()` asks about, unless `contexts` is False.
        """
        self._check_fitted()
        named = ("params", "scale", "floor", "clock", "start", "log_gaps", "history", "seen")
        facts = {name: getattr(self, f"{name}_") for name in named} | {"classes": label_facts(self.classes_)}
        tensors = {f"network.{name}": tensor for name, tensor in self.network_.state_dict().items()}
        tensors["transitions"] = torch.from_numpy(self.transitions_)
        kept = context_tensors(self.contexts_ if contexts else [])
        write_fitted(path, type(self).__name__, facts, {**tensors, **kept})

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> EventModel:
        """The model of a file that `save` wrote, to run on `device`."""
        pick_device(device)
        facts, tensors = read_fitted(path, cls.__name__)
        try:
            made = cls(**{**facts["params"], "device": device})
            made._check()
            made.params_ = facts["params"]
            made.classes_, made.transitions_ = classes_of(facts["classes"]), tensors.pop("transitions").numpy()
            made.scale_, made.floor_ = float(facts["scale"]), float(facts["floor"])
            made.start_ = None if facts["start"] is None else float(facts["start"])
            made.clock_, made.seen_ = str(facts["clock"]), dict(facts["seen"])
            made.log_gaps_ = (float(facts["log_gaps"][0]), float(facts["log_gaps"][1]))
            made.history_ = list(facts["history"])
            check_facts(facts, made.classes_, made.transitions_)
            made.contexts_ = take_contexts(tensors, len(made.classes_))
            weights = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
            made.network_ = filled(lambda: made._network(len(made.classes_), made.floor_), weights, made.depth)
        except KeyError as error:
            raise ValueError(f"{path} is no whole {cls.__name__}: it has no {error}") from None
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is no whole {cls.__name__}: {str(error).splitlines()[0]}") from None
        return made

    def _check(self) -> None:
        check_choice("time", self.time, TIMES)
        check_choice("how", self.how, WAYS)
        check_choice("information", self.information, INFORMATION)
        if not isinstance(self.calendar, (bool, np.bool_)):
            raise TypeError(f"calendar must be True or False, got {self.calendar!r}")
        if self.time == "positions" and self.information == "target_time":
            raise ValueError('information "target_time" needs times: time "positions" sees none')
        sizes = ("width", "depth", "heads", "epochs", "batch_size", "patience")
        check_sizes(self, sizes, gap_weight=math.inf, lr=math.inf, dropout=1, holdout=1)
        check_count("window", self.window, least=2)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")

    @property
    def _targeted(self) -> bool:
        return bool(self.params_["information"] == "target_time")

    def _network(self, types: int, floor: float) -> EventNetwork:
        shape, targeted = (types, self.width, self.depth, self.heads), self.information == "target_time"
        return EventNetwork(*shape, self.time, self.how, self.dropout, targeted, self.calendar, floor)

    def _stream(self, events: Any, times: Any, groups: Any) -> Stream:
        self._check_fitted()
        stream = stream_of(events, times, groups)
        if stream.clock != self.clock_:
            raise ValueError(
                f"times must be {self.clock_}, as this {type(self).__name__} was fitted on, got {stream.clock}"
            )
        return stream

    def _codes(self, stream: Stream) -> Int[np.ndarray, " n"]:
        """Numbers of types; one that was not there in training is refused, since nothing is known of it."""
        known = np.isin(stream.types, self.classes_)
        if not known.all():
            strange = np.unique(stream.types[~known])
            listed = ", ".join(repr(label.item()) for label in strange[:5]) + (", …" if len(strange) > 5 else "")
            rows = f"{int((~known).sum())} of {len(known)} rows"
            raise ValueError(f"events hold types that training did not, in {rows}: {listed}")
        return np.searchsorted(self.classes_, stream.types).astype(np.int64)

    def _windows(self, stream: Stream, codes: Int[np.ndarray, " n"]) -> Windows:
        clock = Clock(self.scale_, self.start_)
        return cut(stream, codes, clock, self.params_["window"], pick_device(self.device))[0]

    @torch.no_grad()
    def _last(
        self, stream: Stream, when: Float64[np.ndarray, " groups"], codes: Int[np.ndarray, " n"] | None = None
    ) -> tuple[Tensor, Mixture]:
        """Of what follows each group's last event, `when` it does: logits (groups, types), and the gap."""
        codes = self._codes(stream) if codes is None else codes
        device = pick_device(self.device)
        clock = Clock(self.scale_, self.start_)
        windows = ends(stream, codes, clock, self.params_["window"], device)
        since = (when - clock.begin(stream)) / self.scale_
        network = self.network_.to(device).eval()
        size, logits, gaps = 4 * self.batch_size, [], []
        for first in range(0, len(stream.groups), size):
            batch = windows.take(range(first, min(first + size, len(stream.groups))))
            moments = torch.from_numpy(since[first : first + size]).to(device).unsqueeze(1)
            batch = batch._replace(next_times=moments.where(batch.counted, batch.next_times))
            found, mixture = following(network, batch)
            logits.append(found.double())
            gaps.append(mixture)
        return torch.cat(logits), Mixture.join(gaps)

    def _moments(self, stream: Stream, at: Any) -> Float64[np.ndarray, " groups"]:
        """When the event to foretell comes; where that is not to be seen, any time."""
        last = stream.last
        if self._targeted and at is None:
            raise ValueError('at must hold a time for each group: this model was fitted with information="target_time"')
        if not self._targeted and at is not None:
            raise ValueError('at is for information="target_time": this model knows the past alone')
        if at is None:
            return last
        when, clock = times_of(at, "at")
        if len(when) != len(last):
            raise ValueError(f"at must hold a time for each of {len(last)} groups, got {len(when)}")
        if clock != self.clock_:
            raise ValueError(f"at must be {self.clock_}, as times are, got {clock}")
        if (when < last).any():
            raise ValueError(
                f"at must not be before a group's last event; {int((when < last).sum())} of {len(when)} are"
            )
        return when
