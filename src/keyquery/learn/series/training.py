"""Training of a SeriesClassifier: batches, loss and validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.learn.inputs.sequences import Padded
from keyquery.learn.layers import regularizer
from keyquery.learn.training.loop import Draw

WARMEST = 20.0  # the largest temperature
BATCHES = 12  # of an epoch, at least: small sets are passed several times
TIE = 1e-3  # weight of the validation loss, as a tie-breaker of the error rate


class Labelled(NamedTuple):
    """Series, their class indices and weights."""

    data: Padded
    target: Int[Tensor, " batch"]
    weight: Float[Tensor, " batch"]

    def take(self, index: Any) -> Labelled:
        """A subset."""
        chosen = torch.as_tensor(index, device=self.target.device)
        return Labelled(self.data.take(chosen), self.target[chosen], self.weight[chosen])


def epochs_of(take: Callable[[Any], Any], count: int, size: int, seed: int, least: int = 1) -> tuple[Draw, int]:
    """A function that draws batches, shuffled in every pass, and their number per epoch, `least` or more."""
    every = -(-count // size)

    def draw(step: int, generator: torch.Generator) -> Any:
        number, batch = divmod(step, every)
        order = np.random.default_rng((seed, number)).permutation(count)
        return take(order[batch * size :][:size])

    return draw, every * -(-least // every)


def augmented(samples: Labelled, strength: float, generator: torch.Generator) -> Labelled:
    """Series whose dims are scaled, with noise, and without a share of up to `strength` of the steps at the ends."""
    values, real = samples.data
    batch, _n, dims = values.shape
    factor = (1 + strength * torch.randn(batch, 1, dims, generator=generator)).to(values)
    noise = (strength * torch.randn(values.shape, generator=generator)).to(values)
    cut = (strength * torch.rand(2, batch, 1, generator=generator) / 2).to(values)
    rank, length = real.cumsum(1), real.sum(1, keepdim=True)
    kept = real & (rank > (cut[0] * length).floor()) & (rank <= length - (cut[1] * length).floor())
    return samples._replace(data=Padded((values * factor + noise).where(kept.unsqueeze(-1), 0.0), kept))


def class_loss(model: nn.Module, batch: Labelled) -> Float[Tensor, ""]:
    """Weighted cross-entropy plus the regularizer of primal layers."""
    losses = cross_entropy(model(*batch.data), batch.target, reduction="none")
    return (batch.weight * losses).mean() + regularizer(model)


@torch.no_grad()
def temperature_of(model: nn.Module, samples: Labelled, size: int) -> float:
    """The temperature, at least 1, with the least cross-entropy: small validation splits must not make it surer."""
    logits = _logits(model.eval(), samples, size)
    candidates = torch.logspace(0, math.log10(WARMEST), 200, dtype=torch.float64).clamp(max=WARMEST).tolist()
    return min(candidates, key=lambda temperature: _weighted(logits / temperature, samples)[1])


def _logits(model: nn.Module, samples: Labelled, size: int) -> Float[Tensor, "n classes"]:
    return torch.cat([model(*batch) for batch in samples.data.batches(size)]).float()


@torch.no_grad()
def judged(model: nn.Module, samples: Labelled, size: int) -> tuple[float, float]:
    """Weighted error rate and cross-entropy."""
    return _weighted(_logits(model, samples, size), samples)


def _weighted(logits: Float[Tensor, "n classes"], samples: Labelled) -> tuple[float, float]:
    losses = cross_entropy(logits, samples.target, reduction="none")
    errors = logits.argmax(1) != samples.target
    weight = samples.weight.double() / samples.weight.double().sum()
    return float(weight @ errors.double()), float(weight @ losses.double())
