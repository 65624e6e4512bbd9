"""Losses and metrics of an EventModel on windows of events."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.learn.events.windows import Batch, Windows
from keyquery.support.progress import Progress, silent


def predicted(batch: Batch) -> Tensor:
    """After which events the next one is predicted and of a known type, (batch, n)."""
    return batch.counted & (batch.next_types >= 0)


def losses(model: nn.Module, batch: Batch, types: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Per counted event of a known type: cross-entropy, negative log-likelihood of its gap, and whether it is right.

    All (count,), in nats; gaps in units of the median gap. Cross-entropies include that an event follows at all, unless
    `types` is the number of types.
    """
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times, batch.inputs)
    at = predicted(batch)
    logits, target = logits[at][:, :types].float(), batch.next_types[at]
    chosen = mixture.at(at)
    return (
        cross_entropy(logits, target, reduction="none"),
        -chosen.log_density(batch.gaps[at]),
        logits.argmax(-1) == target,
    )


@torch.no_grad()
def judged(
    model: nn.Module, windows: Windows, size: int, types: int | None = None, progress: Progress = silent
) -> dict[str, float]:
    """Weighted means over all predicted events: accuracy, and negative log-likelihoods of type and gap."""
    model.eval()
    sums, count = torch.zeros(3, dtype=torch.float64), 0.0
    for batch in progress(windows.batches(size), "evaluating", -(-len(windows.starts) // size)):
        kind, gap, right = losses(model, batch, types)
        weight = torch.ones_like(kind).double() if batch.weights is None else batch.weights[predicted(batch)]
        sums += (torch.stack((right, kind, gap)).double() * weight).sum(1).cpu()
        count += float(weight.sum())
    accuracy, kinds, gaps = (sums / count).tolist()
    return {"accuracy": accuracy, "nll_type": kinds, "nll_gap": gaps}
