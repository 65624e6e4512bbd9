"""Training of an EventModel: losses, validation split and metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.estimators.base import hold_out
from keyquery.estimators.events.mixture import Mixture
from keyquery.estimators.events.network import EventNetwork
from keyquery.estimators.events.windows import Batch, Windows
from keyquery.estimators.series.training import epochs_of
from keyquery.support.progress import Progress
from keyquery.training import Recipe, train


def learn(
    network: EventNetwork,
    windows: Windows,
    owners: Int[np.ndarray, " windows"],
    *,
    holdout: float,
    gap_weight: float,
    size: int,
    epochs: int,
    lr: float,
    patience: int,
    seed: int,
    progress: Progress,
) -> list[dict[str, float]]:
    """Train in place on windows of groups (`owners`), with a validation split of groups; returns one row per epoch."""
    names = np.unique(owners)
    _, held = hold_out(np.zeros(len(names)), holdout, seed)
    apart = torch.from_numpy(np.isin(owners, names[held])).to(windows.starts.device)
    learned, checked = windows.of(~apart), windows.of(apart) if len(held) else None

    def loss(model: Any, batch: Batch) -> Tensor:
        kind, gap, _ = losses(model, batch)
        return kind.mean() + gap_weight * gap.mean()

    def validate(model: Any) -> float:
        assert checked is not None
        metrics = judged(model, checked, 4 * size)
        return metrics["nll_type"] + gap_weight * metrics["nll_gap"]

    draw, every = epochs_of(learned.take, len(learned.starts), size, seed)
    recipe = Recipe(
        steps=epochs * every,
        lr=lr,
        warmup=min(2 * every, epochs * every // 10),
        seed=seed,
        check_every=every,
        patience=patience,
    )
    log = train(network, draw, loss, recipe, validate=validate if checked else None, progress=progress)
    return [{"epoch": int(row.pop("step")) // every, **row} for row in log.rows]


def following(model: nn.Module, batch: Batch) -> tuple[Float[Tensor, "batch types"], Mixture]:
    """Logits and gap distribution after the one counted event of each row."""
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times)
    return logits[batch.counted].float(), mixture.at(batch.counted)


def losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Per counted event: cross-entropy of its type, negative log-likelihood of its gap, and whether it is correct.

    All (count,), in nats; gaps in units of the median gap.
    """
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times)
    at = batch.counted
    logits, target = logits[at].float(), batch.next_types[at]
    chosen = mixture.at(at)
    return (
        cross_entropy(logits, target, reduction="none"),
        -chosen.log_density(batch.gaps[at]),
        logits.argmax(-1) == target,
    )


@torch.no_grad()
def judged(model: nn.Module, windows: Windows, size: int) -> dict[str, float]:
    """Means over all predicted events: accuracy, and negative log-likelihoods of type and gap."""
    model.eval()
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for batch in windows.batches(size):
        kind, gap, right = losses(model, batch)
        sums += torch.stack((right.double().sum(), kind.double().sum(), gap.double().sum())).cpu()
        count += len(kind)
    accuracy, kinds, gaps = (sums / count).tolist()
    return {"accuracy": accuracy, "nll_type": kinds, "nll_gap": gaps}
