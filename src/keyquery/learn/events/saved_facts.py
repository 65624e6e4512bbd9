"""Validation of the facts of a saved EventModel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from keyquery.support.checks import check_choice, check_number

CLOCKS = ("numbers", "dates", "spans")


def check_facts(
    facts: Mapping[str, Any],
    classes: Shaped[np.ndarray, " classes"],
    transitions: Shaped[np.ndarray, "..."],
) -> None:
    """Raise ValueError for facts that no fit produces."""
    for name in ("scale", "floor"):
        check_number(name, facts[name])
        if not facts[name] > 0:
            raise ValueError(f"{name} must be above 0, got {facts[name]}")
    check_choice("clock", facts["clock"], CLOCKS)
    if facts["start"] is not None:
        check_number("start", facts["start"])
    _check_logs(facts["log_gaps"])
    if len(classes) < 1 or np.any(classes[1:] <= classes[:-1]):
        raise ValueError("classes must be one or more, in rising order")
    _check_transitions(transitions, len(classes))


def _check_logs(logs: Any) -> None:
    if not isinstance(logs, (list, tuple)) or len(logs) != 2:
        raise ValueError(f"log_gaps must be a mean and a standard deviation, got {logs!r}")
    for value in logs:
        check_number("log_gaps", value)
    if logs[1] <= 0:
        raise ValueError(f"log_gaps must have a standard deviation above 0, got {logs[1]}")


def _check_transitions(transitions: Shaped[np.ndarray, "..."], classes: int) -> None:
    if transitions.shape != (classes, classes) or transitions.dtype.kind != "i" or np.any(transitions < 0):
        received = f"{transitions.dtype} of shape {transitions.shape}"
        raise ValueError(f"transitions must be non-negative counts, ({classes}, {classes}), got {received}")
