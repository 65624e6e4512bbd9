"""Occlusion importance of the segments of a time series."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.learn.inputs.sequences import Padded
from keyquery.reading import Reading
from keyquery.support.progress import Progress, silent

SHARE = 16  # default window: this fraction of a series
TOGETHER = 16  # windows per batch: more do not fit into the caches of a CPU


@dataclass(frozen=True, kw_only=True)
class Importance(Reading, kind="importance"):
    """Values, predicted class and relevance of each time step, per series."""

    units: ClassVar[Mapping[str, str]] = {"relevance": "nats of log-odds", "stretch": "tokens"}

    classes: Sequence[Any]  # as in `classes_` of the estimator
    series: Sequence[Mapping[str, Any]]  # per series: values, predicted class and its probability, window and relevance
    columns: Sequence[str] | None = None  # names of the dimensions, from data frames

    @property
    def relevance(self) -> list[list[float]]:
        """One list per series, one value per time step."""
        return [row["relevance"] for row in self.series]

    def records(self) -> list[dict[str, Any]]:
        """One row per time step."""
        return [
            {"series": number, "token": token, "predicted": row["predicted"], "relevance": relevance}
            for number, row in enumerate(self.series)
            for token, relevance in enumerate(row["relevance"])
        ]


def occlude(
    log_probabilities: Callable[[Padded], Tensor],
    series: Padded,
    stretch: int | None = None,
    progress: Progress = silent,
) -> tuple[list[float], int, int, float]:
    """Relevance of each time step of one series (n, dims), window length, predicted class and its probability.

    Covered values are replaced by the training mean, 0 here. Log-odds, since probabilities saturate near 1.
    """
    values, real = series
    length = int(real.nonzero().max()) + 1
    width = min(stretch or max(length // SHARE, 1), length)
    firsts = torch.arange(0, length, max(width // 2, 1), device=real.device)
    before = torch.nn.functional.pad(real.cumsum(0), (1, 0))  # real time steps before each
    firsts = firsts[before[(firsts + width).clamp(max=len(real))] > before[firsts]]  # skip windows of padding
    logs = log_probabilities(Padded(values.unsqueeze(0), real.unsqueeze(0)))
    chosen = int(logs[0].argmax())
    odds, steps = log_odds(logs, chosen), torch.arange(len(real), device=real.device)
    lost, times = torch.zeros(2, len(real), dtype=torch.float64, device=real.device)
    parts = firsts.split(TOGETHER)
    for starts in progress(parts, "occluding windows", len(parts)):
        covered = (steps >= starts[:, None]) & (steps < starts[:, None] + width) & real
        without = Padded(values.masked_fill(covered.unsqueeze(-1), 0.0), real.expand(len(starts), -1))
        lost += (odds - log_odds(log_probabilities(without), chosen)) @ covered.double()
        times += covered.sum(0)
    return (lost / times.clamp(min=1)).tolist(), width, chosen, float(logs[0, chosen].exp())


def log_odds(logits: Float[Tensor, "n classes"], chosen: int) -> Float[Tensor, " n"]:
    """log p/(1 − p) of one class."""
    others = torch.cat((logits[:, :chosen], logits[:, chosen + 1 :]), 1)
    return logits[:, chosen] - others.logsumexp(1)
