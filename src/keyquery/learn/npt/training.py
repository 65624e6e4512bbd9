"""Training of NPT: masked and corrupted entries, losses and validation split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.layers.datapoints import Memory
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.training import Recipe
from keyquery.support.progress import Progress, silent

LONG = 2000  # steps of the published runs
CHUNK = {"cpu": 64, "cuda": 1024}  # rows per prediction batch


@dataclass(frozen=True)
class Plan:
    """Training hyperparameters that are not constructor arguments; studies set their own."""

    feature_share: float = 0.15  # of feature entries that are masked
    target_share: float = 0.5  # of targets that are masked; at 1 no target is ever seen, in prediction either
    spoilt: float = 0.1  # share of the masked entries that are replaced by a random value
    trade: float = 1.0  # initial weight of the feature loss; annealed to 0 by a cosine
    lr: float | None = None
    bf16: bool | None = None  # None: on a GPU
    flat: float = 0.7
    dropout: float = 0.1
    published: bool = False
    points: int = 64
    batch: int = 4096  # rows per step with full row attention
    least: int = 20  # rows, below which there is no validation split
    checks: int = 40
    patience: int | None = 24  # checks without improvement, counted once targets outweigh features

    def recipe(self, steps: int, seed: int) -> Recipe:
        """LAMB with Lookahead, gradients clipped elementwise at 1, a flat and then cosine learning rate."""
        published = min(1e-3 * max(LONG / max(steps, 1), 1.0), 2e-2)  # in shorter runs larger
        return Recipe(
            steps=steps,
            lr=published if self.lr is None else self.lr,
            optimiser="npt",
            schedule="flat+cosine",
            flat=self.flat,
            warmup=0,
            weight_decay=0.0,
            clip=None,
            clip_each=1.0,
            seed=seed,
            bf16=self.bf16,
            check_every=max(steps // self.checks, 1),
            patience=self.patience,
        )

    def shown(self, rows: Rows) -> Rows:
        """Rows as a network sees them: if all targets are masked in training, they stay masked."""
        return rows if self.target_share < 1 else masked(rows)


class Batch(NamedTuple):
    """A table with masked entries, their true values, and the weight of the loss of features."""

    rows: Rows
    truth: Rows
    asked: Bool[Tensor, "batch n d"]
    trade: float
    weights: Float[Tensor, "batch n"] | None = None  # of the targets


@dataclass(frozen=True)
class Samples:
    """Rows with targets; indices of the training and validation splits and of rows without a target."""

    rows: Rows
    learned: Int[np.ndarray, " learned"]
    held: Int[np.ndarray, " held"]
    bare: Int[np.ndarray, " bare"]  # rows that are seen without targets
    weights: Float[Tensor, " n"] | None = None  # of the loss of each target

    @property
    def context(self) -> Int[np.ndarray, " some"]:
        """The rows of the support set: those of the training split, and those that never had a target."""
        return np.concatenate((self.learned, np.setdiff1d(self.bare, self.held)))

    def without_target(self, index: Any) -> Rows:
        """Rows with masked targets."""
        return masked(self.rows.take(index))


def spoil(
    rows: Rows, chosen: Bool[Tensor, "n d"], sizes: Int[Tensor, " d"], share: float, generator: torch.Generator
) -> Rows:
    """Mask the chosen entries, or replace a share of them by N(0, 1) or a random category."""
    random: dict[str, Any] = {"generator": generator, "device": chosen.device}
    replaced = chosen & (torch.rand(chosen.shape, **random) < share)
    noise = torch.randn(chosen.shape, **random)
    many = sizes.clamp(min=1)
    drawn = (torch.rand(chosen.shape, **random) * many).long().minimum(many - 1)
    return Rows(
        torch.where(replaced, noise, rows.values),
        torch.where(replaced, drawn, rows.codes),
        rows.hidden | (chosen & ~replaced),
    )


def drawing(samples: Samples, sizes: tuple[int, ...], plan: Plan, steps: int, most: int | None) -> Any:
    """A function that draws the batch of a step: all rows, or a sample of each kind if there are more than `most`."""
    device = samples.rows.hidden.device  # where it draws: a copy from the CPU would synchronise with the GPU
    kinds = [torch.from_numpy(kind).to(device) for kind in (samples.learned, samples.bare)]
    share = 1.0 if most is None else min(most / sum(map(len, kinds)), 1.0)
    counts = [min(len(kind), max(math.ceil(share * len(kind)), 1)) for kind in kinds]
    many = torch.tensor(sizes, device=device)
    learned = torch.arange(sum(counts), device=device) < counts[0]  # the others are seen without targets
    on_device = torch.Generator(device)

    def draw(step: int, generator: torch.Generator) -> Batch:
        random = generator if device.type == "cpu" else on_device.manual_seed(generator.initial_seed())
        index = torch.cat(
            [
                kind if count == len(kind) else kind[torch.randperm(len(kind), generator=random, device=device)[:count]]
                for kind, count in zip(kinds, counts, strict=True)
            ]
        )
        truth = samples.rows.take(index)
        chance = torch.rand(truth.hidden.shape, generator=random, device=device)
        predicted = chance < plan.feature_share
        always = torch.randint(counts[0], (1,), generator=random, device=device)  # is always predicted
        is_always = torch.arange(len(learned), device=device) == always
        predicted[:, -1] = ((chance[:, -1] < plan.target_share) | is_always) & learned
        predicted &= ~truth.hidden
        bare = truth.hidden.clone()
        bare[:, -1] |= ~learned  # targets of the validation split are never seen
        rows = spoil(truth._replace(hidden=bare), predicted, many, plan.spoilt, random)
        trade = plan.trade * (1 + math.cos(math.pi * step / steps)) / 2
        weights = None if samples.weights is None else samples.weights[index].unsqueeze(0)
        return Batch(plan.shown(rows).within(), truth.within(), predicted.unsqueeze(0), trade, weights)

    return draw


def masked(rows: Rows) -> Rows:
    """Rows with masked targets."""
    hidden = rows.hidden.clone()
    hidden[..., -1] = True
    return rows._replace(hidden=hidden)


def losses(network: TableNetwork, batch: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean losses of the masked targets and features: squared errors and cross-entropies."""
    h, last = network(*batch.rows), len(network.sizes) - 1
    costs = []  # of every entry, masked or not: indexing would synchronise with the GPU
    for column, size in enumerate(network.sizes):
        if size:
            logits = network.logits(h[..., column, :], column).float()
            cost = cross_entropy(logits.flatten(0, 1), batch.truth.codes[..., column].flatten(), reduction="none")
            costs.append(cost.view(batch.asked.shape[:2]))
    predicted = network.numbers(h).float()
    cost = (predicted - batch.truth.values).square()
    if costs:
        cost = cost.index_copy(-1, network.categorical, torch.stack(costs, -1))
    if batch.weights is not None:
        cost = torch.cat((cost[..., :last], cost[..., last:] * batch.weights.unsqueeze(-1)), -1)
    sums = cost.where(batch.asked, 0.0).sum((0, 1))
    count = batch.asked.sum((0, 1))
    return sums[last] / count[last].clamp(min=1), sums[:last].sum() / count[:last].sum().clamp(min=1)


def table_loss(model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
    """(1 − λ)·targets + λ·features."""
    targets, features = losses(model, batch)  # type: ignore[arg-type]
    return (1 - batch.trade) * targets + batch.trade * features


@torch.no_grad()
def answers(
    network: TableNetwork,
    rows: Rows,
    memories: list[Memory],
    progress: Progress = silent,
) -> Float[Tensor, "n k"]:
    """Predicted targets of rows, each given the support set `memories` only."""
    size = CHUNK[rows.hidden.device.type]  # of all batches, the last one padded, or a row would depend on their number
    outputs = []
    firsts = range(0, len(rows.hidden), size)
    for first in progress(firsts, "predicting", len(firsts)):
        chunk = Rows(*(part[first : first + size] for part in rows))
        count = len(chunk.hidden)
        filled = Rows(*(pad(part, (0, 0, 0, size - count)) for part in chunk))
        outputs.append(network.target(network(*filled.within(), memories)).squeeze(0)[:count])
    return torch.cat(outputs)


def judged(network: TableNetwork, samples: Samples, plan: Plan) -> float:
    """Validation loss, with all training rows as the support set."""
    memories = network.memories(plan.shown(samples.rows.take(samples.context)).within())
    predicted = answers(network, samples.without_target(samples.held), memories)
    weights = None if samples.weights is None else samples.weights[torch.from_numpy(samples.held)]
    return float(target_cost(predicted, samples.rows.take(samples.held), weights))


def target_cost(
    predicted: Float[Tensor, "n k"], truth: Rows, weights: Float[Tensor, " n"] | None = None
) -> Float[Tensor, ""]:
    """The mean cross-entropy of logits, or squared error of one standardised number, of the targets of n rows."""
    if predicted.shape[1] > 1:
        costs = cross_entropy(predicted.float(), truth.codes[:, -1], reduction="none")
    else:
        costs = mse_loss(predicted[:, 0].float(), truth.values[:, -1], reduction="none")
    return costs.mean() if weights is None else (costs * weights).sum() / weights.sum()
