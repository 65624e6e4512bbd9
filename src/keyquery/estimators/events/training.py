"""Training of an EventModel: losses, validation split and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.estimators.base import hold_out
from keyquery.estimators.events.mixture import Mixture
from keyquery.estimators.events.network import EventNetwork
from keyquery.estimators.events.windows import Batch, Windows
from keyquery.estimators.series.training import epochs_of
from keyquery.estimators.training import fit_network, report
from keyquery.support.progress import Progress
from keyquery.training import Recipe


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
    censored: Censored | None = None,
    verbose: bool = False,
) -> list[dict[str, float]]:
    """Train in place on windows of groups (`owners`), with a validation split of groups; returns one row per epoch.

    Ctrl-C ends training and keeps the best epoch so far. `censored` are the last events of groups, and how long they
    were observed after them.
    """
    names = np.unique(owners)
    _, held = hold_out(np.zeros(len(names)), validation_fraction, seed)
    apart = torch.from_numpy(np.isin(owners, names[held])).to(windows.starts.device)
    learned, checked = windows.of(~apart), windows.of(apart) if len(held) else None

    silences: Sequence[Censored | None] = [None, None] if censored is None else censored.split(names[held])
    weight = 0.0 if silences[0] is None else len(silences[0].spans) / int((learned.lengths - learned.skips).sum())

    def loss(model: Any, batch: Batch) -> Tensor:
        kind, gap, _ = losses(model, batch)
        total = kind.mean() + gap_weight * gap.mean()
        if silences[0] is not None and weight:
            drawn = torch.randint(len(silences[0].spans), (size,))
            total = total + gap_weight * weight * silences[0].losses(model, drawn).mean()
        return total

    def validate(model: Any) -> float:
        assert checked is not None
        metrics = judged(model, checked, 4 * size)
        value = metrics["nll_type"] + gap_weight * metrics["nll_gap"]
        if silences[1] is not None and len(silences[1].spans):
            value += gap_weight * weight * silences[1].judged(model, 4 * size)
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


class Censored(NamedTuple):
    """The last event of each group, and the span without an event after it, in units of the median gap."""

    windows: Windows
    spans: Float64[Tensor, " groups"]
    owners: Int[np.ndarray, " groups"]

    def of(self, chosen: np.ndarray) -> Censored:
        """Some of the groups."""
        which = torch.from_numpy(chosen).to(self.spans.device)
        return Censored(self.windows.of(which), self.spans[which], self.owners[chosen])

    def split(self, held: np.ndarray) -> list[Censored]:
        """The groups that are trained on, and those that are held out."""
        return [self.of(np.isin(self.owners, held) == side) for side in (False, True)]

    def losses(self, model: nn.Module, index: Tensor) -> Tensor:
        """−log P(gap > span) of some groups, in nats."""
        batch = self.windows.take(index)
        batch = batch._replace(next_times=batch.times)  # what follows is another group's
        return -following(model, batch)[1].log_survival(self.spans[index.to(self.spans.device)]).float()

    @torch.no_grad()
    def judged(self, model: nn.Module, size: int) -> float:
        """The mean over all groups."""
        model.eval()
        parts = torch.arange(len(self.spans)).split(size)
        return float(torch.cat([self.losses(model, part) for part in parts]).double().mean())


def following(model: nn.Module, batch: Batch) -> tuple[Float[Tensor, "batch types"], Mixture]:
    """Logits and gap distribution after the one counted event of each row."""
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times)
    return logits[batch.counted].float(), mixture.at(batch.counted)


def losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Per counted event of a known type: cross-entropy, negative log-likelihood of its gap, and whether it is right.

    All (count,), in nats; gaps in units of the median gap.
    """
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times)
    at = batch.counted & (batch.next_types >= 0)
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
