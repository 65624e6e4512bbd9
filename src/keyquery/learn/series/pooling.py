"""Pooling of convolutions over time: shares and means of values above thresholds, and sustained values."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

OUTSIDE = torch.finfo(torch.float32).min  # below every value, and finite, so that it vanishes if multiplied by 0


def pooled(
    values: Float[Tensor, "kernels n batch"], count: Int[Tensor, " batch"], thresholds: Float[Tensor, "kernels count"]
) -> list[Float[Tensor, "kernels batch"]]:
    """For each threshold, the share of the `count` values of each series that are above it, and the mean of these.

    Values outside a series are `OUTSIDE`. Without values above, the mean is 0.
    """
    features, above = list[Tensor](), torch.empty_like(values)
    share = 1 / count.clamp(min=1).to(values)
    for threshold in thresholds.T[..., None, None]:
        number = torch.gt(values, threshold, out=above).sum(1)
        total = above.mul_(values).sum(1)
        features += [number * share, total / number.clamp(min=1)]
    return features


def sustained(values: Float[Tensor, "kernels n batch"], levels: int) -> list[Float[Tensor, "kernels batch"]]:
    """The largest value that is sustained for 1, 4, 16 … steps: the maximum over windows of their minimum.

    A series is above t for 4 consecutive steps if and only if the second exceeds t. A window longer than the series
    counts as the next shorter one.
    """
    features, size = [maximum(values)], 1
    for _level in range(1, levels):
        if values.shape[1] <= 3 * size:
            features.append(features[-1])
            continue
        for step in (size, 2 * size):
            values = torch.minimum(values[:, step:], values[:, :-step])
        size *= 4
        largest = maximum(values)
        features.append(torch.where(largest > OUTSIDE, largest, features[-1]))
    return features


def maximum(values: Float[Tensor, "kernels n batch"]) -> Float[Tensor, "kernels batch"]:
    """The maximum over time, by halves: several times as fast as `amax` on a CPU."""
    while (n := values.shape[1]) > 1:
        values = torch.maximum(values[:, : (n + 1) // 2], values[:, n // 2 :])
    return values[:, 0]
