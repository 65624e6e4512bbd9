"""Which stretches of a series a class rests on: what its odds become without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyquery.estimators.sequences import Padded
from keyquery.reading import Reading

SHARE = 16  # a window is such a part of a series, unless the user says otherwise


@dataclass(frozen=True, kw_only=True)
class Importance(Reading, kind="importance"):
    """For each series its values, the class that was predicted, and how much each token speaks for it."""

    units: ClassVar[Mapping[str, str]] = {"relevance": "nats of log-odds", "stretch": "tokens"}

    classes: Sequence[Any]
    series: Sequence[Mapping[str, Any]]

    @property
    def relevance(self) -> list[list[float]]:
        """One list a series, one figure a token."""
        return [one["relevance"] for one in self.series]

    def records(self) -> list[dict[str, Any]]:
        """One row a token."""
        return [
            {"series": number, "token": token, "predicted": one["predicted"], "relevance": relevance}
            for number, one in enumerate(self.series)
            for token, relevance in enumerate(one["relevance"])
        ]


def occlude(
    log_probabilities: Callable[[Padded], Tensor], one: Padded, stretch: int | None = None
) -> tuple[list[float], int, int, float]:
    """Relevance of each token of one series (n, dims), the window's length, the class predicted and its probability.

    The mean of the training data, which is 0 here, stands in for what a window covers; a token that is missing has 0.
    Log-odds, log p/(1 − p), since a probability near 1 stays there whatever is left out.
    """
    values, real = one
    places = real.nonzero().squeeze(1)
    length = int(places[-1]) + 1
    width = min(stretch or max(length // SHARE, 1), length)
    firsts = torch.arange(0, length, max(width // 2, 1), device=real.device)
    at = torch.arange(len(real), device=real.device)
    covered = (at >= firsts[:, None]) & (at < firsts[:, None] + width) & real
    covered = covered[covered.any(1)]
    without = values.masked_fill(covered.unsqueeze(-1), 0.0)
    several = Padded(torch.cat((values.unsqueeze(0), without)), real.expand(len(without) + 1, -1))
    found = log_probabilities(several)
    chosen = int(found[0].argmax())
    others = torch.cat((found[:, :chosen], found[:, chosen + 1 :]), 1)
    odds = found[:, chosen] - others.logsumexp(1)
    weights = covered.double()
    relevance = ((odds[0] - odds[1:]) @ weights) / weights.sum(0).clamp(min=1)
    return relevance.tolist(), width, chosen, float(found[0, chosen].exp())
