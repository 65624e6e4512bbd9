"""Streaming means and covariances, float64, in one pass and bounded memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.listening.call import Call
from keyquery.listening.hooks import Batch
from keyquery.listening.parts.pairs import Inputs, projected, require_called, watch_layers


class Moments:
    """Running mean and covariance of vectors in batches (..., n, d), per leading dimensions.

    >>> moments = Moments()
    >>> moments.update(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    >>> moments.update(torch.tensor([[4.0, 3.0]]))
    >>> moments.mean, moments.covariance[1, 1]
    (tensor([2., 1.], dtype=torch.float64), tensor(2., dtype=torch.float64))
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._scatter: Tensor | None = None

    def update(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Add a batch of vectors."""
        x = x.double()
        n = x.shape[-2]
        if n == 0:
            return
        mean = x.mean(-2)
        centred = x - mean.unsqueeze(-2)
        scatter = centred.mT @ centred
        if self._mean is None or self._scatter is None:
            self.count = n
            self._mean = mean
            self._scatter = scatter
            return
        total, shift = self.count + n, mean - self._mean
        outer = shift.unsqueeze(-1) * shift.unsqueeze(-2)
        self._mean = self._mean + shift * (n / total)
        self._scatter = self._scatter + scatter + outer * (self.count * n / total)
        self.count = total

    @property
    def mean(self) -> Float[Tensor, "*batch d"]:
        """The mean of all vectors so far."""
        if self._mean is None:
            raise ValueError("no activations have been added yet")
        return self._mean

    @property
    def covariance(self) -> Float[Tensor, "*batch d d"]:
        """The covariance of all vectors so far, divided by their number."""
        if self._scatter is None:
            raise ValueError("no activations have been added yet")
        return self._scatter / self.count


def joint_moments(model: nn.Module, batches: Iterable[Batch], heads: Heads) -> dict[int, Moments]:
    """Moments of [q; k] of every head, (heads, 2r), by the index of each self-attention layer, over all tokens.

    Statistics of scores depend on these only, such as QΣKᵀ, without the d×d covariance Σ.
    """
    layers = [layer for layer in heads if layer.on_data and layer.by_offset]
    moments: dict[int, Moments] = {}

    def note(layer: Layer, inputs: Inputs, call: Call | None) -> None:
        joint = torch.cat(projected(layer, inputs["query"], call), -1)
        moments.setdefault(layer.index, Moments()).update(joint)

    with watch_layers(model, layers, note) as run:
        for batch in batches:
            run(batch)
    require_called(layers, moments)
    return {layer.index: moments[layer.index] for layer in layers}
