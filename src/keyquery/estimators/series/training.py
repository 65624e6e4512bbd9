"""How networks learn classes of series: batches, the loss, and what is right in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.estimators.inputs.sequences import Padded
from keyquery.layers import regularizer
from keyquery.training.loop import Draw

TIE = 1e-3  # what a nat of loss counts beside the share of errors, when epochs are compared


class Labelled(NamedTuple):
    """Series and the numbers of their classes."""

    data: Padded
    target: Int[Tensor, " batch"]

    def take(self, index: Any) -> Labelled:
        """Some of them."""
        chosen = torch.as_tensor(index, device=self.target.device)
        return Labelled(self.data.take(chosen), self.target[chosen])


def epochs_of(take: Callable[[Any], Any], count: int, size: int, seed: int) -> tuple[Draw, int]:
    """What draws batches, every sample once an epoch in an order of its own, and how many batches an epoch has.

    `take(index)` gives some of `count` samples.
    """
    every = -(-count // size)

    def draw(step: int, generator: torch.Generator) -> Any:
        epoch, batch = divmod(step, every)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        return take(order[batch * size :][:size])

    return draw, every


def class_loss(model: nn.Module, batch: Labelled) -> Float[Tensor, ""]:
    """Cross-entropy, and what primal layers add to it."""
    return cross_entropy(model(*batch.data), batch.target) + regularizer(model)


@torch.no_grad()
def judged(model: nn.Module, samples: Labelled, size: int) -> tuple[float, float]:
    """The share of errors, and the cross-entropy."""
    logits = torch.cat([model(*batch) for batch in samples.data.batches(size)]).float()
    errors = (logits.argmax(1) != samples.target).double().mean()
    return float(errors), float(cross_entropy(logits, samples.target))
