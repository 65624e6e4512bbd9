"""Evaluation of next-event prediction, with count-based baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64, Int

from keyquery.estimators.events.mixture import Mixture
from keyquery.reading import Reading


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
    """How often a type (column) followed a type (row), (types, types).

    >>> transitions(np.array([0, 1, 0]), np.array([1, 0, 1]), 2)
    array([[0, 2],
           [1, 0]])
    """
    return np.bincount(last * types + following, minlength=types * types).reshape(types, types)


def counted(
    counts: Int[np.ndarray, "types types"],
    logs: tuple[float, float],
    floor: float,
    last: Int[np.ndarray, " pairs"],
    following: Int[np.ndarray, " pairs"],
    gaps: Float64[np.ndarray, " pairs"],
) -> list[dict[str, Any]]:
    """Baselines "majority" and "Markov": the most frequent next type, overall and after the last type.

    Probabilities are counts with add-one smoothing; inter-event times are log-normal with mean and standard deviation
    `logs`. Both use the past only, whatever the model uses.
    """
    weight, mean, spread = (torch.tensor([value], dtype=torch.float64) for value in (0.0, *logs))
    log_normal = Mixture(weight, mean, spread, floor)
    gap = -float(log_normal.log_density(torch.from_numpy(gaps)).mean())
    ways = {"majority": np.broadcast_to(counts.sum(0), counts.shape), "Markov": counts}
    rows = []
    for name, type_counts in ways.items():
        type_counts = np.concatenate([type_counts, counts.sum(0, keepdims=True)])  # −1: after an unknown type
        shares = (type_counts + 1) / (type_counts + 1).sum(1, keepdims=True)
        right = float(np.mean(shares.argmax(1)[last] == following))
        nll = -float(np.mean(np.log(shares[last, following])))
        rows.append({"by": name, "information": "past", "accuracy": right, "nll_type": nll, "nll_gap": gap})
    return rows
