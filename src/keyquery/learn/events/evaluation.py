"""Evaluation of next-event prediction, with count-based baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64, Int

from keyquery.learn.events.losses import judged
from keyquery.learn.events.mixture import Mixture
from keyquery.learn.inputs.event_streams import Stream
from keyquery.reading import Reading, digests, provenance
from keyquery.support.progress import bars


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


def transitions(last: Int[np.ndarray, " pairs"], following: Int[np.ndarray, " pairs"], types: int) -> np.ndarray:
    """How often a type (column) followed a type (row), (types, types)."""
    return np.bincount(last * types + following, minlength=types * types).reshape(types, types)


def counted(
    counts: Int[np.ndarray, "types types"],
    logs: tuple[float, float],
    floor: float,
    last: Int[np.ndarray, " pairs"],
    following: Int[np.ndarray, " pairs"],
    gaps: Float64[np.ndarray, " pairs"],
    weights: Float64[np.ndarray, " pairs"] | None = None,
) -> list[dict[str, Any]]:
    """Baselines "majority" and "Markov": the most frequent next type, overall and after the last type.

    Probabilities are counts with add-one smoothing; inter-event times are log-normal with mean and standard deviation
    `logs`. Both use the past only, whatever the model uses.
    """
    weight, mean, spread = (torch.tensor([value], dtype=torch.float64) for value in (0.0, *logs))
    log_normal = Mixture(weight, mean, spread, floor)
    gap = -float(np.average(log_normal.log_density(torch.from_numpy(gaps)).numpy(), weights=weights))
    ways = {"majority": np.broadcast_to(counts.sum(0), counts.shape), "Markov": counts}
    rows = []
    for name, type_counts in ways.items():
        type_counts = np.concatenate([type_counts, counts.sum(0, keepdims=True)])  # −1: after an unknown type
        shares = (type_counts + 1) / (type_counts + 1).sum(1, keepdims=True)
        right = float(np.average(shares.argmax(1)[last] == following, weights=weights))
        nll = -float(np.average(np.log(shares[last, following]), weights=weights))
        rows.append({"by": name, "information": "past", "accuracy": right, "nll_type": nll, "nll_gap": gap})
    return rows


def evaluated(model: Any, stream: Stream) -> EventEvaluation:
    """The evaluation of a fitted EventModel on a stream."""
    codes = model._codes(stream)
    if len(stream.gaps) == 0:
        raise ValueError("no group has a second event: there is nothing to predict")
    if not (codes[1:][stream.inside] >= 0).any():
        raise ValueError("no event that follows another is of a type that occurred in training")
    windows = model._windows(stream, codes)
    network = model.network_.to(windows.starts.device)
    information, types = model.params_["information"], len(model.classes_)
    with bars(model.verbose) as progress:
        metrics = judged(network, windows, 4 * model.batch_size, types, progress)
    pairs = codes[:-1][stream.inside], codes[1:][stream.inside], stream.gaps / model.scale_
    known_next = pairs[1] >= 0
    weights = np.ones(len(known_next)) if stream.weights is None else stream.weights[1:][stream.inside]
    parts = [part[known_next] for part in (*pairs, weights)]
    baselines = counted(model.transitions_, model.log_gaps_, model.floor_, *parts)
    rows = [{"by": model.params_["time"], "information": information, **metrics}, *baselines]
    for each in rows:  # an unknown type cannot be predicted: an error
        each["accuracy"] *= float(np.average(known_next, weights=weights))
    return EventEvaluation(
        information=information,
        events=len(stream.gaps),
        firsts=len(stream.groups),
        rows=rows,
        unknown=int((~known_next).sum()),
        provenance=provenance(
            tensors=digests(model.network_.state_dict()), estimator=repr(type(model)(**model.params_))
        ),
    )
