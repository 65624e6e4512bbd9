"""Training of an EventModel: losses on windows and on what follows the last events, and a split of whole groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.learn.base import hold_out
from keyquery.learn.events.network import EventNetwork, Mixture
from keyquery.learn.events.windows import Batch, Clock, Windows, ends
from keyquery.learn.fitting import fit_network
from keyquery.learn.inputs.event_streams import Stream, times_per_group
from keyquery.learn.series.training import epochs_of
from keyquery.learn.training import Recipe
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


def log_ends(logits: Tensor, types: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities that no event follows, −∞ if the model does not know ends, and that one does."""
    logs = logits.double().log_softmax(-1)
    return logs[..., types:].logsumexp(-1), logs[..., :types].logsumexp(-1)


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
        end, more = log_ends(logits, self.types)
        silence = torch.logaddexp(end, more + mixture.log_survival(self.spans[rows]))
        return -(end.where(self.ended[rows], silence) * self.weights[rows]).float()

    @torch.no_grad()
    def judged(self, model: nn.Module, size: int) -> float:
        """The mean over all groups."""
        model.eval()
        parts = torch.arange(len(self.spans)).split(size)
        return float(torch.cat([self.losses(model, part) for part in parts]).double().mean())


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
        raise ValueError(
            f"ended must be True or False, or one of them for each of {count} groups in order of first appearance, "
            f"got {over.dtype} of shape {over.shape}"
        )
    if ended is not None and estimator.information == "target_time":
        raise ValueError('ended needs information="past": an end has no time at which a type could be asked for')
    return np.broadcast_to(over, count).copy()


def learn(
    estimator: Any,
    network: EventNetwork,
    windows: Windows,
    owners: Int[np.ndarray, " windows"],
    lasts: Lasts,
    seed: int,
    progress: Progress,
) -> list[dict[str, float]]:
    """Train in place, holding out some of the groups, whose windows `owners` name; one row per epoch."""
    gap_weight, size = estimator.gap_weight, estimator.batch_size
    names = np.unique(owners[windows.weighed()])
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
