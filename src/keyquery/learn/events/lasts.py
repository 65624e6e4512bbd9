"""What is known after the last event of a group: that it was observed for a while, or that it has ended."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor, nn

from keyquery.learn.events.mixture import Mixture
from keyquery.learn.events.windows import Batch, Windows


class Lasts(NamedTuple):
    """The last event of each group of which something is known, and the span without an event after it.

    Spans are in units of the median gap. A group that has ended has no next event; of one that was observed for a span
    it is known that the next event, if there is one, comes later (censoring).
    """

    windows: Windows
    spans: Float64[Tensor, " groups"]
    ended: Bool[Tensor, " groups"]
    owners: Int[np.ndarray, " groups"]
    weights: Float64[Tensor, " groups"]

    def of(self, chosen: np.ndarray) -> Lasts:
        """Some of the groups."""
        which = torch.from_numpy(chosen).to(self.spans.device)
        return Lasts(
            self.windows.of(which), self.spans[which], self.ended[which], self.owners[chosen], self.weights[which]
        )

    def split(self, held: np.ndarray) -> list[Lasts]:
        """The groups that are trained on, and those that are held out."""
        return [self.of(np.isin(self.owners, held) == side) for side in (False, True)]

    def losses(self, model: nn.Module, index: Tensor, types: int) -> Tensor:
        """Weighted −log P(end) of groups that have ended, and −log P(no event within the span) of others, in nats."""
        batch = self.windows.take(index)
        batch = batch._replace(next_times=batch.times)  # what follows is another group's
        logits, mixture = following(model, batch)
        at = index.to(self.spans.device)
        end, later = log_ends(logits, types), mixture.log_survival(self.spans[at])
        silent = later if end is None else torch.logaddexp(end[0], end[1] + later)
        known = silent if end is None else end[0].where(self.ended[at], silent)
        return -(known * self.weights[at]).float()

    @torch.no_grad()
    def judged(self, model: nn.Module, size: int, types: int) -> float:
        """The mean over all groups."""
        model.eval()
        parts = torch.arange(len(self.spans)).split(size)
        return float(torch.cat([self.losses(model, part, types) for part in parts]).double().mean())


def following(model: nn.Module, batch: Batch) -> tuple[Tensor, Mixture]:
    """Logits and gap distribution after the one counted event of each row."""
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times, batch.inputs)
    return logits[batch.counted].float(), mixture.at(batch.counted)


def log_ends(logits: Any, types: int) -> tuple[Tensor, Tensor] | None:
    """Log-probabilities that no event follows and that one does; None if the model does not know ends."""
    if logits.shape[-1] == types:
        return None
    logs = logits.double().log_softmax(-1)
    return logs[..., -1], logs[..., :-1].logsumexp(-1)
