"""Rounding of keys and values to a few bits, with a scale and an offset per token or per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

BITS = (2, 3, 4, 8)
SMALLEST = 1e-8  # step, of vectors that are constant


@dataclass(frozen=True)
class Quantiser:
    """Asymmetric rounding to `bits`: of each token over its channels, or of each channel over its tokens.

    `rotated`: after a Hadamard rotation of the channels, which spreads outliers, and is undone afterwards.
    """

    bits: int
    per_channel: bool = False
    rotated: bool = False

    def __call__(
        self, x: Float[Tensor, "batch heads m r"], real: Bool[Tensor, "batch m"] | None = None
    ) -> Float[Tensor, "batch heads m r"]:
        """The rounded vectors; padding (not `real`) sets no range."""
        turn = hadamard(x.shape[-1]).to(x) if self.rotated else None
        x = x if turn is None else x @ turn
        low = high = x
        if self.per_channel and real is not None:
            padding = ~real[:, None, :, None]
            low, high = x.masked_fill(padding, torch.inf), x.masked_fill(padding, -torch.inf)
        dim = -2 if self.per_channel else -1
        low, high = low.amin(dim, keepdim=True), high.amax(dim, keepdim=True)
        step = (high - low).clamp(min=SMALLEST) / (2**self.bits - 1)
        rounded = ((x - low) / step).round().clamp(0, 2**self.bits - 1) * step + low
        return rounded if turn is None else rounded @ turn.mT


def hadamard(width: int) -> Float[Tensor, "width width"]:
    """An orthogonal matrix of Hadamard blocks, of the largest power of 2 that divides the width."""
    block = torch.ones(1, 1)
    while width % (2 * len(block)) == 0:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.block_diag(*[block / len(block) ** 0.5] * (width // len(block)))
