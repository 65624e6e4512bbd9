"""Streaming means and covariances, float64, in one pass and bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.listening.hooks import Batch, entry, watch


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


def batches_of(data: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate over batches, each a mapping of tensors; raises on anything else.

    Parameters
    ----------
    data
        Mappings of tensors.

    Returns
    -------
    iterator of dict
        The batches.

    Examples
    --------
    >>> list(batches_of([{"x": torch.tensor([1])}]))
    [{'x': tensor([1])}]
    """
    if isinstance(data, (Mapping, Tensor, str)):
        raise TypeError(f"data must be an iterable of batches (mappings of tensors), got {type(data).__name__}")
    for batch in data:
        if not isinstance(batch, Mapping):
            raise TypeError(f"data must contain mappings of tensors, got {type(batch).__name__}")
        yield batch


def joint_moments(model: nn.Module, batches: Iterable[Batch], heads: Heads) -> dict[int, Moments]:
    """Moments of [q; k] of every head, (heads, 2r), by the index of each self-attention layer, over all tokens.

    Statistics of scores depend on these only, such as QΣKᵀ, without the d×d covariance Σ.

    Parameters
    ----------
    model
        The live model.
    batches
        Its inputs by name.
    heads
        The heads of that model, from `kq.read`.

    Returns
    -------
    dict
        Moments by the index of the layer.
    """
    moments_of = {layer.index: Moments() for layer in heads if layer.on_data and layer.by_offset}
    by_entry: dict[str, list[Layer]] = {}
    for layer in heads:
        if layer.index in moments_of:
            by_entry.setdefault(entry(layer), []).append(layer)

    def listener(layers: list[Layer]) -> object:
        def hear(tokens: Tensor) -> None:
            for layer in layers:
                query, key = layer.project(tokens.float())
                joint = torch.cat((query, key.expand_as(query)), dim=-1)
                moments_of[layer.index].update(joint.flatten(0, 1))

        return hear

    with watch(model, {name: listener(layers) for name, layers in by_entry.items()}) as run:  # type: ignore[misc]
        for batch in batches:
            run(batch)
    silent = [heads[index].name for index, moments in moments_of.items() if moments.count == 0]
    if silent:
        raise ValueError(f"{silent[0]} was never called: these inputs give no activations there")
    return moments_of
