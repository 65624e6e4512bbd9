"""Losses of an EventModel on windows, and on what follows the last events of groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.learn.events.network import Mixture
from keyquery.learn.events.windows import Batch, Windows
from keyquery.support.progress import Progress, silent


def losses(model: nn.Module, batch: Batch, types: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Per predicted event of a known type: cross-entropy, negative log-likelihood of its gap, and whether it is right.

    All (count,), in nats; cross-entropies include that an event follows at all, unless `types` is their number.
    """
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times, batch.inputs)
    chosen = batch.predicted
    logits, target = logits[chosen][:, :types].float(), batch.next_types[chosen]
    kinds = cross_entropy(logits, target, reduction="none")
    return kinds, -mixture.at(chosen).log_density(batch.gaps[chosen]), logits.argmax(-1) == target


@torch.no_grad()
def judged(
    model: nn.Module, windows: Windows, size: int, types: int | None = None, progress: Progress = silent
) -> dict[str, float]:
    """Weighted means over all predicted events: accuracy, and negative log-likelihoods of type and gap."""
    model.eval()
    sums, count = torch.zeros(3, dtype=torch.float64), 0.0
    for batch in progress(windows.batches(size), "evaluating", -(-len(windows.starts) // size)):
        kind, gap, right = losses(model, batch, types)
        weight = torch.ones_like(kind).double() if batch.weights is None else batch.weights[batch.predicted]
        sums += (torch.stack((right, kind, gap)).double() * weight).sum(1).cpu()
        count += float(weight.sum())
    return dict(zip(("accuracy", "nll_type", "nll_gap"), (sums / count).tolist(), strict=True))


def following(model: nn.Module, batch: Batch) -> tuple[Tensor, Mixture]:
    """Logits and gap distribution after the one counted event of each row."""
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times, batch.inputs)
    return logits[batch.counted].float(), mixture.at(batch.counted)


def log_ends(logits: Tensor, types: int) -> tuple[Tensor, Tensor] | None:
    """Log-probabilities that no event follows and that one does; None if the model does not know ends."""
    if logits.shape[-1] == types:
        return None
    logs = logits.double().log_softmax(-1)
    return logs[..., -1], logs[..., :-1].logsumexp(-1)


class Lasts(NamedTuple):
    """The last events of groups that have ended, or that were observed for a span without another event (censoring)."""

    windows: Windows
    spans: Float64[Tensor, " groups"]  # in units of the median gap
    ended: Bool[Tensor, " groups"]
    weights: Float64[Tensor, " groups"]
    owners: Int[np.ndarray, " groups"]
    types: int  # number of event types

    def of(self, chosen: Bool[np.ndarray, " groups"]) -> Lasts:
        """Some of the groups."""
        which = torch.from_numpy(chosen).to(self.spans.device)
        spans, ended, weights = self.spans[which], self.ended[which], self.weights[which]
        return Lasts(self.windows.of(which), spans, ended, weights, self.owners[chosen], self.types)

    def losses(self, model: nn.Module, index: Tensor) -> Tensor:
        """Weighted −log P(end) of groups that have ended, and −log P(no event within the span) of others, in nats."""
        batch = self.windows.take(index)
        batch = batch._replace(next_times=batch.times)  # what follows is another group's
        logits, mixture = following(model, batch)
        rows = index.to(self.spans.device)
        end, later = log_ends(logits, self.types), mixture.log_survival(self.spans[rows])
        silence = later if end is None else torch.logaddexp(end[0], end[1] + later)
        known = silence if end is None else end[0].where(self.ended[rows], silence)
        return -(known * self.weights[rows]).float()

    @torch.no_grad()
    def judged(self, model: nn.Module, size: int) -> float:
        """The mean over all groups."""
        model.eval()
        parts = torch.arange(len(self.spans)).split(size)
        return float(torch.cat([self.losses(model, part) for part in parts]).double().mean())
