"""Evaluation of next-event prediction, with count-based baselines, and sampled continuations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Shaped

from keyquery.learn.events.network import Mixture, judged
from keyquery.learn.inputs.event_streams import Stream, in_clock, longer
from keyquery.reading import Reading
from keyquery.support.progress import Progress, bars


@dataclass(frozen=True, kw_only=True)
class EventEvaluation(Reading, kind="event evaluation"):
    """Accuracy and negative log-likelihoods of next events, of the model and of count-based baselines.

    `events` is the number of predicted events; `firsts`, the first events of the groups, are not predicted.
    """

    units: ClassVar[Mapping[str, str]] = {
        "accuracy": "share of events",
        "nll_type": "nats per event",
        "nll_gap": "nats per event, with gaps in units of the training data's median gap",
    }

    information: str  # what predictions may use: "past" or "target_time"
    events: int  # predicted events
    firsts: int  # first events of the groups, which are not predicted
    rows: Sequence[Mapping[str, Any]]  # one per model or baseline: accuracy and likelihoods
    unknown: int = 0  # events of a type that did not occur in training: errors, and not in the likelihoods

    @property
    def accuracy(self) -> float:
        """Accuracy of the model."""
        return float(self.rows[0]["accuracy"])

    @property
    def nll_type(self) -> float:
        """Negative log-likelihood of the type, of the model."""
        return float(self.rows[0]["nll_type"])

    @property
    def nll_gap(self) -> float:
        """Negative log-likelihood of the inter-event time, of the model."""
        return float(self.rows[0]["nll_gap"])

    def records(self) -> list[dict[str, Any]]:
        """One row per predictor."""
        return [dict(row) for row in self.rows]


class Events(NamedTuple):
    """Sampled events as three columns of equal length."""

    events: Shaped[np.ndarray, " n"]
    times: Shaped[np.ndarray, " n"]
    groups: Shaped[np.ndarray, " n"]


def transitions(last: Int[np.ndarray, " pairs"], following: Int[np.ndarray, " pairs"], types: int) -> np.ndarray:
    """How often a type (column) followed a type (row), (types, types)."""
    return np.bincount(last * types + following, minlength=types * types).reshape(types, types)


def evaluated(model: Any, stream: Stream) -> EventEvaluation:
    """The evaluation of a fitted EventModel on a stream."""
    last, following = stream.types[:-1][stream.inside], stream.types[1:][stream.inside]
    known = following >= 0
    if not known.any():
        raise ValueError("nothing to predict: no event that follows another is of a type that occurred in training")
    windows, information = model._windows(stream), model.params_["information"]
    network = model.network_.to(windows.starts.device)
    with bars(model.verbose) as progress:
        metrics = judged(network, windows, 4 * model.batch_size, len(model.classes_), progress)
    weights = np.ones(len(known)) if stream.weights is None else stream.weights[1:][stream.inside]
    baselines = _baselines(model, last[known], following[known], (stream.gaps / model.scale_)[known], weights[known])
    rows = [{"by": model.params_["time"], "information": information, **metrics}, *baselines]
    for row in rows:  # an unknown type cannot be predicted: an error
        row["accuracy"] *= float(np.average(known, weights=weights))
    return EventEvaluation(
        information=information,
        events=len(known),
        firsts=len(stream.groups),
        rows=rows,
        unknown=int((~known).sum()),
        provenance=model._provenance(),
    )


def _baselines(
    model: Any, last: np.ndarray, following: np.ndarray, gaps: np.ndarray, weights: np.ndarray
) -> list[dict[str, Any]]:
    """Baselines "majority" and "Markov": the most frequent next type, overall and after the last type.

    Probabilities are counts with add-one smoothing; inter-event times are log-normal with the mean and standard
    deviation of the training data. Both use the past only, whatever the model uses.
    """
    weight, mean, spread = (torch.tensor([value], dtype=torch.float64) for value in (0.0, *model.log_gaps_))
    log_normal, counts = Mixture(weight, mean, spread, model.floor_), model.transitions_
    gap = -float(np.average(log_normal.log_density(torch.from_numpy(gaps)).numpy(), weights=weights))
    rows = []
    for name, type_counts in (("majority", np.broadcast_to(counts.sum(0), counts.shape)), ("Markov", counts)):
        type_counts = np.concatenate([type_counts, counts.sum(0, keepdims=True)])  # −1: after an unknown type
        shares = (type_counts + 1) / (type_counts + 1).sum(1, keepdims=True)
        right = float(np.average(shares.argmax(1)[last] == following, weights=weights))
        nll = -float(np.average(np.log(shares[last, following]), weights=weights))
        rows.append({"by": name, "information": "past", "accuracy": right, "nll_type": nll, "nll_gap": gap})
    return rows


def sampled(model: Any, stream: Stream, n: int, seed: int, progress: Progress) -> Events:
    """The next n events of each group of a stream: the time first, then the type at that time.

    Where the model knows ends, a group has fewer if its end is drawn. Covariates of drawn events are unknown.
    """
    generator, types = torch.Generator().manual_seed(seed), len(model.classes_)
    alive = [np.ones(len(stream.groups), dtype=bool)]
    inputs = None if stream.inputs is None else model.described_.unknown(stream.inputs[stream.offsets[1:] - 1])
    for _ in progress(range(n), "sampling", n):
        logits, mixture = model._last(stream, stream.last)
        when = stream.last + mixture.draw(generator).double().cpu().numpy() * model.scale_
        if model._targeted:
            logits, _ = model._last(stream, when)
        kind = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).squeeze(1).numpy()
        alive.append(alive[-1] & (kind < types))
        stream = longer(stream, np.minimum(kind, types - 1), when, inputs)  # what follows an end is left out
    kept = np.stack(alive[1:], 1)
    rows = (stream.offsets[1:, None] + np.arange(-n, 0))[kept]
    groups = np.repeat(stream.groups, kept.sum(1))
    return Events(model.classes_[stream.types[rows]], in_clock(stream.times[rows], model.clock_), groups)
