"""Pooling of convolutions over time: shares and means of values above thresholds, and sustained values."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def pooled(
    values: Float[Tensor, "kernels n batch"], count: Int[Tensor, " batch"], thresholds: Float[Tensor, "kernels count"]
) -> list[Float[Tensor, "kernels batch"]]:
    """For each threshold, the share of the `count` values of each series that are above it, and the mean of these.

    Values outside a series are −∞. Without values above, the mean is 0.

    >>> values = torch.tensor([[[1.0], [5.0], [0.0], [7.0]]])
    >>> [float(feature) for feature in pooled(values, torch.tensor([4]), torch.tensor([[2.0]]))]
    [0.5, 6.0]
    """
    n, features, above = values.shape[1], list[Tensor](), torch.empty_like(values)
    share = 1 / count.clamp(min=1).to(values)
    for threshold in thresholds.T.unsqueeze(-1):
        number = torch.gt(values, threshold.unsqueeze(-1), out=above).sum(1)
        largest = torch.maximum(values, threshold.unsqueeze(-1), out=above).sum(1)
        total = largest - threshold * (n - number)  # Σ max(v, t) counts t for each value that is not above it
        features += [number * share, (total / number.clamp(min=1)).masked_fill_(number == 0, 0.0)]
    return features


def sustained(values: Float[Tensor, "kernels n batch"], levels: int) -> list[Float[Tensor, "kernels batch"]]:
    """The largest value that is sustained for 1, 4, 16 … steps: the maximum over windows of their minimum.

    A series is above t for 4 consecutive steps if and only if the second exceeds t. Windows longer than a series count
    as the longest that fit.

    >>> [float(feature) for feature in sustained(torch.tensor([[[9.0], [2.0], [3.0], [4.0], [5.0], [1.0]]]), 2)]
    [9.0, 2.0]
    """
    features, size = [maximum(values)], 1
    for _level in range(1, levels):
        for step in (size, 2 * size):
            if values.shape[1] > step:
                values = torch.minimum(values[:, step:], values[:, :-step])
        size *= 4
        largest = maximum(values)
        features.append(torch.where(largest.isfinite(), largest, features[-1]))
    return features


def maximum(values: Float[Tensor, "kernels n batch"]) -> Float[Tensor, "kernels batch"]:
    """The maximum over time, by halves: several times as fast as `amax` on a CPU.

    >>> maximum(torch.tensor([[[1.0], [3.0], [2.0]]]))
    tensor([[3.]])
    """
    while (n := values.shape[1]) > 1:
        values = torch.maximum(values[:, : (n + 1) // 2], values[:, n // 2 :])
    return values[:, 0]
