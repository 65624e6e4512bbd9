"""Features of competing kernels: which kernel of a group matches a series best, and how often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.learn.inputs.sequences import Padded
from keyquery.learn.series.convolution import LENGTH, batched, convolved, differences, subsets
from keyquery.support.progress import Progress, silent

GROUP = 8  # kernels that compete
GROUPS = 32  # per dilation, for series and again for their differences
CHUNK = 8  # groups at a time: more do not fit into the caches of a CPU
TIE = 1e-5  # convolutions that differ by less are equal: where a series is constant, all kernels win


class Competing(nn.Module):
    """Features of series (batch, n, dims): how often, and how strongly, each kernel wins against those of its group.

    After Hydra (Dempster, Schmidt and Webb, 2023): random normal kernels of nine weights whose sum is 0, in groups of
    eight, with dilations 1, 2, 4 … At each time step the kernel of the largest convolution scores that value, and the
    kernel of the smallest one scores 1. Features are the square roots of the mean scores. Half of them are those of
    first differences. The kernels of a group read the same random subset of the dims.
    """

    def __init__(self, dims: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.dilations = dilations
        shape = (2 * len(dilations), GROUP, GROUPS, LENGTH * dims)
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)

    @classmethod
    def fitted(cls, series: Padded, generator: np.random.Generator) -> Competing:
        """Random kernels, for series of this length."""
        most = max((int(series.real.sum(1).max()) - 1) / (LENGTH - 1), 1.0)
        dims = series.values.shape[-1]
        module = cls(dims, [2**power for power in range(int(np.log2(most)) + 1)])
        for weight in module.weight.data:
            kernels = generator.normal(size=(GROUP * GROUPS, LENGTH, 1))
            kernels -= kernels.mean(1, keepdims=True)
            kernels /= np.abs(kernels).sum(1, keepdims=True)
            chosen = np.tile(subsets(GROUPS, dims, generator), (GROUP, 1))[:, None]
            weight.copy_(torch.from_numpy((kernels * chosen).reshape(weight.shape)))
        return module.to(series.values.device)

    @property
    def width(self) -> int:
        """Number of features."""
        return 4 * len(self.dilations) * GROUP * GROUPS

    @torch.no_grad()
    def forward(self, series: Padded, progress: Progress = silent) -> Float[Tensor, "batch features"]:
        """The features of all series, in batches."""
        return batched(self._features, series, GROUP * CHUNK, "competing kernels", progress)

    def _features(self, series: Padded) -> Float[Tensor, "batch features"]:
        features, number = list[Tensor](), 0
        for view in (series, differences(series)):
            for dilation in self.dilations:
                for weight in self.weight[number].split(CHUNK, 1):
                    features += scores(convolved(view.values, weight.flatten(0, 1), dilation), view)
                number += 1
        return torch.cat(features).clamp(min=0).sqrt().T


def scores(values: Float[Tensor, "kernels n batch"], view: Padded) -> list[Float[Tensor, "kernels batch"]]:
    """Mean scores of the kernels k · groups + g of each group g: values of the largest, and counts of the smallest."""
    real, size = view.real.T, (1 / view.real.sum(1)).to(values)
    each = values.unflatten(0, (GROUP, -1))
    largest, smallest = each.amax(0) - TIE, each.amin(0) + TIE
    if not real.all():
        largest.masked_fill_(~real, torch.inf)
        smallest.masked_fill_(~real, -torch.inf)
    wins = torch.lt(each, smallest, out=torch.empty_like(each))
    counts = wins.sum(2)
    strength = torch.gt(each, largest, out=wins).mul_(each).sum(2)
    return [(score * size).flatten(0, 1) for score in (strength, counts)]
