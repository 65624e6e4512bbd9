"""Base class of EventModel: parameter checks, encoding of events, training, forward passes, save and load."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, Shaped
from torch import Tensor

from keyquery.learn.base import SavedEstimator, check_is_fitted, check_sizes, hold_out
from keyquery.learn.events.covariates import Described
from keyquery.learn.events.interactions import Context, context_tensors, take_contexts
from keyquery.learn.events.losses import Lasts, following, judged, losses
from keyquery.learn.events.network import TIMES, EventNetwork, Mixture
from keyquery.learn.events.windows import Batch, Clock, Windows, cut, ends
from keyquery.learn.fitting import fit_network, report
from keyquery.learn.inputs.columns import times_of
from keyquery.learn.inputs.event_streams import Stream, stream_of, unpacked
from keyquery.learn.inputs.targets import classes_of, label_facts
from keyquery.learn.layers.time.attention import WAYS
from keyquery.learn.series.training import epochs_of
from keyquery.learn.training import Recipe
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress

INFORMATION = ("past", "target_time")
UNKNOWN = ("other", "refuse")
SAVED = ("scale", "floor", "clock", "start", "log_gaps", "seen")


class EventEstimator(SavedEstimator):
    """The private half of EventModel."""

    time: str
    how: str
    information: str
    unknown: str
    calendar: bool
    width: int
    depth: int
    heads: int
    window: int
    dropout: float
    gap_weight: float
    batch_size: int
    device: Any
    network_: EventNetwork
    classes_: Shaped[np.ndarray, " classes"]
    scale_: float  # median of the positive inter-event times; the internal unit of time
    floor_: float  # inter-event times below this many units are not distinguished
    clock_: str
    start_: float | None  # origin of time, with `calendar`
    transitions_: Int[np.ndarray, "classes classes"]
    log_gaps_: tuple[float, float]  # mean and standard deviation of the log inter-event times
    contexts_: list[Context]
    described_: Described  # encodings of covariates
    ends_: bool  # whether it was fitted with `ended`
    seen_: dict[str, int]

    @classmethod
    def _params_of(cls, facts: dict[str, Any]) -> dict[str, Any]:
        """The parameters of a file; former versions called `validation_fraction` `holdout`."""
        params = dict(facts["params"])
        if "holdout" in params:
            params["validation_fraction"] = params.pop("holdout")
        return params

    def _saved(self, contexts: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
        facts = {name: getattr(self, f"{name}_") for name in SAVED} | {"classes": label_facts(self.classes_)}
        facts |= {"covariates": self.described_.facts(), "ends": self.ends_}
        tensors = context_tensors(self.contexts_ if contexts else [])
        return facts, {"transitions": torch.from_numpy(self.transitions_), **tensors}

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], EventNetwork], int]:
        self.classes_, self.transitions_ = classes_of(facts["classes"]), tensors.pop("transitions").numpy()
        _check_facts(facts, self.classes_, self.transitions_)
        self.scale_, self.floor_ = float(facts["scale"]), float(facts["floor"])
        self.start_ = None if facts["start"] is None else float(facts["start"])
        self.clock_, self.seen_ = str(facts["clock"]), dict(facts["seen"])
        self.log_gaps_ = (float(facts["log_gaps"][0]), float(facts["log_gaps"][1]))
        self.described_, self.ends_ = Described.of_facts(facts.get("covariates")), bool(facts.get("ends", False))
        self.contexts_ = take_contexts(tensors, len(self.classes_), self.described_.size)
        more = self._further(self.described_, self.ends_)
        return lambda: self._network(len(self.classes_), self.floor_, **more), self.depth

    def _check(self) -> None:
        check_choice("time", self.time, TIMES)
        check_choice("how", self.how, WAYS)
        check_choice("information", self.information, INFORMATION)
        check_choice("unknown", self.unknown, UNKNOWN)
        if not isinstance(self.calendar, (bool, np.bool_)):
            raise TypeError(f"calendar must be True or False, got {self.calendar!r}")
        if self.time == "positions" and self.information == "target_time":
            raise ValueError('information="target_time" needs times, which time="positions" does not use')
        sizes = ("width", "depth", "heads", "epochs", "batch_size", "patience")
        check_sizes(self, sizes, gap_weight=math.inf, lr=math.inf, dropout=1, validation_fraction=1)
        check_count("window", self.window, least=2)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")

    @property
    def _targeted(self) -> bool:
        return bool(self.params_["information"] == "target_time")

    @staticmethod
    def _further(described: Described, ends: bool) -> dict[str, Any]:
        """Options of a network with covariates or ends."""
        return ({"inputs": described.size} if described.size else {}) | ({"ends": True} if ends else {})

    def _network(self, types: int, floor: float, **further: Any) -> EventNetwork:
        shape, targeted = (types, self.width, self.depth, self.heads), self.information == "target_time"
        return EventNetwork(*shape, self.time, self.how, self.dropout, targeted, self.calendar, floor, **further)

    def _provenance(self) -> dict[str, Any]:
        """What readings of this model were computed from."""
        tensors = digests(self.network_.state_dict())
        return provenance(tensors=tensors, estimator=repr(type(self)(**self.params_)))

    def _stream(
        self, events: Any, times: Any, groups: Any, covariates: Any = None, group_covariates: Any = None
    ) -> Stream:
        """The events of a prediction, sorted, with their covariates encoded as in training."""
        check_is_fitted(self)
        events, times, groups, covariates = unpacked(events, times, groups, covariates)
        stream = stream_of(events, times, groups)
        inputs = self.described_.encode(covariates, group_covariates, stream.rows, stream.lengths)
        if stream.clock != self.clock_:
            fitted = f"as this {type(self).__name__} was fitted on"
            raise ValueError(f"times must be {self.clock_}, {fitted}, got {stream.clock}")
        return replace(stream, inputs=inputs)

    def _codes(self, stream: Stream) -> Int[np.ndarray, " n"]:
        """Class indices of the event types; −1, with a warning, for types that did not occur in training."""
        known = np.isin(stream.types, self.classes_)
        if not known.all():
            unknown = np.unique(stream.types[~known])
            listed = ", ".join(repr(label.item()) for label in unknown[:5]) + (", …" if len(unknown) > 5 else "")
            rows = f"{int((~known).sum())} of {len(known)} rows"
            problem = f"events hold types that did not occur in training, in {rows}: {listed}"
            if self.unknown == "refuse":
                raise ValueError(problem)
            warnings.warn(f"{problem}; they count as an event of unknown type", stacklevel=4)
        codes = np.full(len(known), -1, dtype=np.int64)
        codes[known] = np.searchsorted(self.classes_, stream.types[known])
        return codes

    def _windows(self, stream: Stream, codes: Int[np.ndarray, " n"]) -> Windows:
        clock = Clock(self.scale_, self.start_)
        return cut(stream, codes, clock, self.params_["window"], pick_device(self.device))[0]

    @torch.no_grad()
    def _last(
        self, stream: Stream, when: Float64[np.ndarray, " groups"], codes: Int[np.ndarray, " n"] | None = None
    ) -> tuple[Tensor, Mixture]:
        """Logits (groups, types) of the next event of each group at time `when`, and the inter-event time."""
        codes = self._codes(stream) if codes is None else codes
        device, clock = pick_device(self.device), Clock(self.scale_, self.start_)
        windows = ends(stream, codes, clock, self.params_["window"], device)
        since = torch.from_numpy((when - clock.begin(stream)) / self.scale_).to(device).unsqueeze(1)
        network, logits, gaps = self.network_.to(device).eval(), [], []
        for part in torch.arange(len(stream.groups), device=device).split(4 * self.batch_size):
            batch = windows.take(part)
            batch = batch._replace(next_times=since[part].where(batch.counted, batch.next_times))
            batch_logits, mixture = following(network, batch)  # with `ended`, the last logit is the end
            logits.append(batch_logits.double())
            gaps.append(mixture)
        return torch.cat(logits), Mixture.join(gaps)

    def _moments(self, stream: Stream, at: Any) -> Float64[np.ndarray, " groups"]:
        """The times of the predicted events; any time if the model does not condition on it."""
        if self._targeted and at is None:
            raise ValueError('at must hold a time for each group: this model was fitted with information="target_time"')
        if not self._targeted and at is not None:
            raise ValueError('at is for information="target_time": this model was fitted with information="past"')
        return stream.last if at is None else _per_group("at", at, stream)

    def _lasts(
        self, stream: Stream, codes: Int[np.ndarray, " n"], clock: Clock, until: Any, ended: Any, device: str
    ) -> Lasts | None:
        """What is known after the last events of the groups; None if nothing is."""
        if until is None and ended is None:
            return None
        count, last = len(stream.groups), stream.last
        over = np.zeros(count, dtype=bool) if ended is None else self._ended(ended, count)
        spans = np.zeros(count) if until is None else (_per_group("until", until, stream) - last) / clock.scale
        weights = np.where(over, 1.0, self.gap_weight)
        if stream.weights is not None:
            weights *= np.add.reduceat(stream.weights, stream.offsets[:-1]) / stream.lengths
        windows = ends(stream, codes, clock, self.window, device)
        parts = [torch.from_numpy(part).to(device) for part in (spans, over, weights)]
        lasts = Lasts(windows, parts[0], parts[1], np.arange(count), parts[2], int(codes.max()) + 1)
        return lasts.of(over | (until is not None))

    def _ended(self, ended: Any, count: int) -> Bool[np.ndarray, " groups"]:
        """Whether each group has ended; a single value is that of all."""
        over = np.asarray(ended)
        if over.dtype.kind != "b" or over.shape not in ((), (count,)):
            raise ValueError(
                f"ended must be True or False, or one of them for each of {count} groups in order of first appearance, "
                f"got {over.dtype} of shape {over.shape}"
            )
        if not over.any():
            raise ValueError("ended is False for all groups: there is no end to learn from; leave it out")
        if self.information == "target_time":
            raise ValueError('ended needs information="past": an end has no time at which a type could be asked for')
        return np.broadcast_to(over, count).copy()

    def _silent(self, stream: Stream, now: Any) -> Float64[Tensor, " groups"]:
        """The time since the last event of each group, in units of the median gap."""
        spans = np.zeros(len(stream.groups)) if now is None else _per_group("now", now, stream) - stream.last
        return torch.from_numpy(spans / self.scale_)


def learn(
    estimator: Any,
    network: EventNetwork,
    windows: Windows,
    owners: Int[np.ndarray, " windows"],
    lasts: Lasts | None,
    seed: int,
    progress: Progress,
) -> list[dict[str, float]]:
    """Train in place by the parameters of an EventModel; returns one row per epoch.

    Some of the groups, whose windows `owners` name, are a validation split. `lasts` is what is known after the last
    events of groups.
    """
    gap_weight, size = estimator.gap_weight, estimator.batch_size
    names = np.unique(owners[windows.weighed()])
    _, held = hold_out(np.zeros(len(names)), estimator.validation_fraction, seed)
    apart = torch.from_numpy(np.isin(owners, names[held])).to(windows.starts.device)
    learned, checked = windows.of(~apart), windows.of(apart) if len(held) else None
    inside = np.zeros(0, dtype=bool) if lasts is None else np.isin(lasts.owners, names[held])
    known, tested = (None, None) if lasts is None else (lasts.of(~inside), lasts.of(inside))
    share = 0.0 if known is None else len(known.spans) / int((learned.lengths - learned.skips).sum())

    def loss(model: Any, batch: Batch) -> Tensor:
        kind, gap, _ = losses(model, batch)
        total = kind.mean() + gap_weight * gap.mean()
        if batch.weights is not None:
            total = ((kind + gap_weight * gap) * batch.weights[batch.predicted]).mean().float()
        if known is not None and share:
            total = total + share * known.losses(model, torch.randint(len(known.spans), (size,))).mean()
        return total

    def validate(model: Any) -> float:
        assert checked is not None
        metrics = judged(model, checked, 4 * size)
        value = metrics["nll_type"] + gap_weight * metrics["nll_gap"]
        if tested is not None and len(tested.spans):
            value += share * tested.judged(model, 4 * size)
        report(estimator.verbose, f"validation: {value:.4f} nats per event, accuracy {metrics['accuracy']:.3f}")
        return value

    draw, every = epochs_of(learned.take, len(learned.starts), size, seed)
    steps = estimator.epochs * every
    recipe = Recipe(
        steps=steps,
        lr=estimator.lr,
        warmup=min(2 * every, steps // 10),
        seed=seed,
        check_every=every,
        patience=estimator.patience,
    )
    log = fit_network(network, draw, loss, recipe, validate=validate if checked else None, progress=progress)
    return [{"epoch": int(row.pop("step")) // every, **row} for row in log.rows]


def _per_group(name: str, moments: Any, stream: Stream) -> Float64[np.ndarray, " groups"]:
    """A time for each group, none before its last event; a single time is that of all."""
    last, single = stream.last, np.ndim(moments) == 0
    when, clock = times_of([moments] if single else moments, name)
    when = np.repeat(when, len(last)) if single else when
    if len(when) != len(last):
        raise ValueError(f"{name} must hold a time for each of {len(last)} groups, got {len(when)}")
    if clock != stream.clock:
        raise ValueError(f"{name} must be {stream.clock}, like times, got {clock}")
    if early := int((when < last).sum()):
        raise ValueError(f"{name} must not be before a group's last event; {early} of {len(when)} are")
    return when


def _check_facts(
    facts: Mapping[str, Any], classes: Shaped[np.ndarray, " classes"], transitions: Shaped[np.ndarray, "..."]
) -> None:
    """Raise ValueError for facts of a file that no fit produces."""
    logs = facts["log_gaps"]
    if not isinstance(logs, (list, tuple)) or len(logs) != 2:
        raise ValueError(f"log_gaps must be a mean and a standard deviation, got {logs!r}")
    numbers = {"scale": facts["scale"], "floor": facts["floor"], "log_gaps": logs[1]}
    for name, value in {**numbers, "start": facts["start"] or 0.0, "mean of log_gaps": logs[0]}.items():
        check_number(name, value)
    for name, value in numbers.items():
        if not value > 0:
            positive = "have a standard deviation above 0" if name == "log_gaps" else "be above 0"
            raise ValueError(f"{name} must {positive}, got {value}")
    check_choice("clock", facts["clock"], ("numbers", "dates", "spans"))
    if len(classes) < 1 or np.any(classes[1:] <= classes[:-1]):
        raise ValueError("classes must be one or more, in rising order")
    count = len(classes)
    if transitions.shape != (count, count) or transitions.dtype.kind != "i" or np.any(transitions < 0):
        received = f"{transitions.dtype} of shape {transitions.shape}"
        raise ValueError(f"transitions must be non-negative counts, ({count}, {count}), got {received}")
