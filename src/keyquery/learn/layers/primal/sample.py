"""Evenly spaced tokens f(X), and the projection weights W_e|X = f(X)ᵀWe, W_r|X = f(X)ᵀWr."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad


def evenly(
    n: int, most: int, real: Bool[Tensor, "batch n"] | None, device: torch.device
) -> tuple[Int[Tensor, "*batch rows"], Bool[Tensor, "batch rows"] | None]:
    """Indices of min(most, n) evenly spaced tokens, including first and last; of real tokens if `real` is not None.

    A sample with fewer real tokens than rows uses only its first rows; the second output marks them.
    """
    rows = min(most, n)
    row = torch.arange(rows, device=device)
    if real is None:
        return row * (n - 1) // max(rows - 1, 1), None
    count = real.sum(1, keepdim=True)
    used = count.clamp(max=rows)
    among = row * (count - 1) // (used - 1).clamp(min=1)  # rank among the real tokens
    positions = torch.searchsorted(real.cumsum(1), among.minimum(count - 1) + 1).clamp(max=n - 1)
    return positions, row < used


def take(x: Float[Tensor, "batch n d"], positions: Int[Tensor, "*batch rows"]) -> Float[Tensor, "batch rows d"]:
    """Tokens of x at these positions."""
    if positions.ndim == 1:
        return x.index_select(1, positions)
    return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def weigh(
    sample: Float[Tensor, "batch rows heads p"], directions: Float[Tensor, "2 heads rows s"]
) -> Float[Tensor, "2 batch heads p s"]:
    """W_e|X = Σⱼ xⱼWe[j]ᵀ and W_r|X = Σⱼ xⱼWr[j]ᵀ of every head, over sampled tokens."""
    s = directions.shape[-1]
    both = directions.permute(1, 2, 0, 3).flatten(2)
    aligned = pad(both, (0, -2 * s % 8))  # products of other widths are many times slower on a GPU
    products = torch.bmm(sample.permute(2, 0, 3, 1).flatten(1, 2), aligned)[..., : 2 * s]
    return products.unflatten(1, (len(sample), sample.shape[-1])).unflatten(-1, (2, s)).permute(3, 1, 0, 2, 4)
