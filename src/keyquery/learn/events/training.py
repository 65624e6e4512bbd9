"""Training of an EventModel, with a validation split of whole groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keyquery.learn.base import hold_out
from keyquery.learn.events.network import EventNetwork, Lasts, judged, losses
from keyquery.learn.events.windows import Batch, Clock, Windows, ends
from keyquery.learn.fitting import epochs_of, fit_network
from keyquery.learn.inputs.event_streams import Stream, times_per_group
from keyquery.learn.training import Recipe
from keyquery.support.progress import Progress


def lasts_of(estimator: Any, stream: Stream, clock: Clock, until: Any, ended: Any, device: str) -> Lasts:
    """What is known after the last events of groups; none of them without `until` and `ended`."""
    count = len(stream.groups)
    over = _ended(estimator, ended, count)
    spans = np.zeros(count) if until is None else (times_per_group("until", until, stream) - stream.last) / clock.scale
    weights = np.where(over, 1.0, estimator.gap_weight)
    if stream.weights is not None:
        weights *= np.add.reduceat(stream.weights, stream.offsets[:-1]) / stream.lengths
    windows, types = ends(stream, clock, estimator.window, device), int(stream.types.max()) + 1
    known, heavy, gone = (torch.from_numpy(part).to(device) for part in (spans, weights, over))
    return Lasts(windows, known, gone, heavy, np.arange(count), types).of(over | (until is not None))


def _ended(estimator: Any, ended: Any, count: int) -> Bool[np.ndarray, " groups"]:
    """Whether each group has ended; a single value is that of all."""
    over = np.asarray(False if ended is None else ended)
    if over.dtype.kind != "b" or over.shape not in ((), (count,)):
        given = f"{over.dtype} of shape {over.shape}"
        raise ValueError(f"ended must be True or False, or one of them for each of {count} groups, got {given}")
    if ended is not None and estimator.information == "target_time":
        raise ValueError('ended needs information="past": an end has no time at which a type could be asked for')
    return np.broadcast_to(over, count).copy()


def learn(
    estimator: Any,
    network: EventNetwork,
    stream: Stream,
    windows: Windows,
    owners: Int[np.ndarray, " windows"],
    lasts: Lasts,
    seed: int,
    progress: Progress,
) -> list[dict[str, float]]:
    """Train in place, holding out some of the groups, whose windows `owners` name; one row per epoch."""
    gap_weight, size = estimator.gap_weight, estimator.batch_size
    predicted = stream.inside if stream.weights is None else stream.inside & (stream.weights[1:] > 0)
    names = np.unique(stream.owners[1:][predicted])
    held = names[hold_out(np.zeros(len(names)), estimator.validation_fraction, seed)[1]]
    apart = torch.from_numpy(np.isin(owners, held)).to(windows.starts.device)
    learned, checked = windows.of(~apart), windows.of(apart)
    known, tested = (lasts.of(chosen) for chosen in (~np.isin(lasts.owners, held), np.isin(lasts.owners, held)))
    share = len(known.spans) / int((learned.lengths - learned.skips).sum())

    def loss(model: Any, batch: Batch) -> Tensor:
        kind, gap, _ = losses(model, batch)
        total = kind.mean() + gap_weight * gap.mean()
        if batch.weights is not None:
            total = ((kind + gap_weight * gap) * batch.weights[batch.predicted]).mean().float()
        if share:
            total = total + share * known.losses(model, torch.randint(len(known.spans), (size,))).mean()
        return total

    def validate(model: Any) -> float:
        metrics = judged(model, checked, 4 * size)
        value = metrics["nll_type"] + gap_weight * metrics["nll_gap"]
        return value + share * tested.judged(model, 4 * size) if len(tested.spans) else value

    draw, every = epochs_of(learned.take, len(learned.starts), size, seed)
    steps = estimator.epochs * every
    options = {"warmup": min(2 * every, steps // 10), "check_every": every, "patience": estimator.patience}
    recipe = Recipe(steps, estimator.lr, seed=seed, **options)
    shown: dict[str, Any] = {"progress": progress, "verbose": estimator.verbose}
    log = fit_network(network, draw, loss, recipe, validate=validate if len(held) else None, **shown)
    return [{"epoch": int(row.pop("step")) // every, **row} for row in log.rows]
