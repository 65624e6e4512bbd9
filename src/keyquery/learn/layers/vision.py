"""Vision transformer encoder."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.layers.blocks import Encoder


class VisionEncoder(nn.Module):
    """Vision transformer for images of `size` × `size` pixels: linear patch embedding, learned positions, an Encoder.

    `depth=0` has no Encoder.

    >>> VisionEncoder(16, patch=4, dim=32, depth=2, heads=4)(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 16, 32])
    """

    def __init__(self, size: int, patch: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"patch must divide size: {patch} does not divide {size}")
        self.size, self.dim, self.tokens = size, dim, (size // patch) ** 2
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.places = nn.Parameter(0.5 * torch.randn(self.tokens, dim))
        self.encoder = Encoder(dim, depth, heads) if depth else None

    def forward(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch tokens dim"]:
        """Features of the patches, row by row."""
        x = self._embedded(images)
        return x if self.encoder is None else self.encoder(x)

    def with_attention(
        self, images: Float[Tensor, "batch 3 h w"]
    ) -> tuple[Float[Tensor, "batch tokens dim"], Float[Tensor, "batch tokens tokens"] | None]:
        """Features, and attention maps of the last layer, if there is one, averaged over heads, without gradients."""
        x = self._embedded(images)
        if self.encoder is None:
            return x, None
        last: Any = self.encoder.blocks[-1]
        for block in self.encoder.blocks[:-1]:
            x = block(x)
        with torch.no_grad():
            maps = last.attention.maps(last.attention_norm(x)).mean(1)
        return self.encoder.norm(last(x)), maps

    def _embedded(self, images: Tensor) -> Tensor:
        shape = (3, self.size, self.size)
        if images.ndim != 4 or images.shape[1:] != shape:
            raise ValueError(f"images must be (batch, {', '.join(map(str, shape))}), got {tuple(images.shape)}")
        return self.patches(images).flatten(2).mT + self.places
