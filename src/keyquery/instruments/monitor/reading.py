"""The reading of a monitor: curves of every head over training steps, alarms and clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyquery.reading import Reading

METRICS = {
    "largest": "logit",
    "smallest": "logit",
    "entropy": "nats",
    "relative_entropy": "share of uniform attention",
    "sink": "share of attention",
    "sigma": "σ₁(M)",
    "bound": "logit",
    "input_norm": "‖x‖",
    "unscaled": "|q·k|",
    "query_gradient": "‖∂L/∂Wq‖",
    "key_gradient": "‖∂L/∂Wk‖",
    "effective_rank": "dimensions",
    "symmetric": "share of score variance",
    "skew": "share of score variance",
    "popularity": "share of score variance",
    "position": "share of score variance",
    "finite": "1 if all logits are finite",
}


@dataclass(frozen=True, kw_only=True)
class Monitored(Reading, kind="monitor"):
    """What a monitor recorded: `curves[metric][head][record]`, None where not measured."""

    units = METRICS

    model: Mapping[str, Any]  # name and facts of the model
    steps: Sequence[int]  # recorded optimiser steps
    heads: Sequence[Mapping[str, Any]]  # {layer, head, name}
    curves: Mapping[str, Sequence[Sequence[float | None]]]  # by metric: heads × steps
    alarms: Sequence[Mapping[str, Any]] = ()  # {step, rule, heads, head, value, reason}; the loss is of no head
    clips: Sequence[Mapping[str, Any]] = ()  # {step, name, largest, factor}
    losses: Sequence[float | None] = ()  # mean loss of the steps since the record before, where it was given

    def records(self) -> list[dict[str, Any]]:
        """One row per step and head."""
        return [
            {"step": step, **head, **{metric: curve[at][record] for metric, curve in self.curves.items()}}
            for record, step in enumerate(self.steps)
            for at, head in enumerate(self.heads)
        ]
