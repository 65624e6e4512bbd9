"""Training of an EventModel, with a validation split of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from keyquery.learn.base import hold_out
from keyquery.learn.events.lasts import Lasts
from keyquery.learn.events.losses import judged, losses, predicted
from keyquery.learn.events.network import EventNetwork
from keyquery.learn.events.windows import Batch, Windows
from keyquery.learn.fitting import fit_network, report
from keyquery.learn.series.training import epochs_of
from keyquery.learn.training import Recipe
from keyquery.support.progress import Progress


def learn(
    network: EventNetwork,
    windows: Windows,
    owners: Int[np.ndarray, " windows"],
    *,
    validation_fraction: float,
    gap_weight: float,
    size: int,
    epochs: int,
    lr: float,
    patience: int,
    seed: int,
    progress: Progress,
    types: int,
    lasts: Lasts | None = None,
    verbose: bool = False,
) -> list[dict[str, float]]:
    """Train in place on windows of groups (`owners`), with a validation split of groups; returns one row per epoch.

    Ctrl-C ends training and keeps the best epoch so far. `lasts` is what is known after the last events of groups.
    """
    names = np.unique(owners[weighed(windows)])
    _, held = hold_out(np.zeros(len(names)), validation_fraction, seed)
    apart = torch.from_numpy(np.isin(owners, names[held])).to(windows.starts.device)
    learned, checked = windows.of(~apart), windows.of(apart) if len(held) else None

    known: Sequence[Lasts | None] = [None, None] if lasts is None else lasts.split(names[held])
    share = 0.0 if known[0] is None else len(known[0].spans) / int((learned.lengths - learned.skips).sum())

    def loss(model: Any, batch: Batch) -> Tensor:
        kind, gap, _ = losses(model, batch)
        total = kind.mean() + gap_weight * gap.mean()
        if batch.weights is not None:
            total = ((kind + gap_weight * gap) * batch.weights[predicted(batch)]).mean().float()
        if known[0] is not None and share:
            drawn = torch.randint(len(known[0].spans), (size,))
            total = total + share * known[0].losses(model, drawn, types).mean()
        return total

    def validate(model: Any) -> float:
        assert checked is not None
        metrics = judged(model, checked, 4 * size)
        value = metrics["nll_type"] + gap_weight * metrics["nll_gap"]
        if known[1] is not None and len(known[1].spans):
            value += share * known[1].judged(model, 4 * size, types)
        report(verbose, f"validation: {value:.4f} nats per event, accuracy {metrics['accuracy']:.3f}")
        return value

    draw, every = epochs_of(learned.take, len(learned.starts), size, seed)
    recipe = Recipe(
        steps=epochs * every,
        lr=lr,
        warmup=min(2 * every, epochs * every // 10),
        seed=seed,
        check_every=every,
        patience=patience,
    )
    log = fit_network(network, draw, loss, recipe, validate=validate if checked else None, progress=progress)
    return [{"epoch": int(row.pop("step")) // every, **row} for row in log.rows]


def weighed(windows: Windows) -> np.ndarray:
    """Which windows predict an event whose weight is above 0."""
    if windows.weights is None:
        return np.ones(len(windows.starts), dtype=bool)
    above = torch.cat((torch.zeros(1), (windows.weights > 0).cpu().cumsum(0)))
    first, last = windows.starts + windows.skips + 1, windows.starts + windows.lengths + 1
    return (above[last.cpu()] > above[first.cpu()]).numpy()
