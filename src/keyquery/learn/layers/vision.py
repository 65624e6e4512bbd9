"""Vision transformer encoder, and masks of related patches."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from keyquery.layers.blocks import Encoder
from keyquery.support.checks import check_count


class VisionEncoder(nn.Module):
    """Vision transformer: linear patch embedding, learned positions and an Encoder; `depth=0` has no Encoder.

    `attention` holds the options of `kq.Encoder`. Images are `size` pixels high and wide, or (height, width), which
    `patch` divides.

    Parameters
    ----------
    size
        Pixels, or (height, width).
    patch
        Pixels along the side of a patch; divides `size`.
    dim
        Width of the residual stream.
    depth
        Blocks; 0: patch embedding only.
    heads
        Attention heads.
    channels
        Of the images. Default: 3.
    **attention
        Options of `kq.Encoder`.

    Examples
    --------
    >>> parser = VisionEncoder(16, patch=4, dim=32, depth=2, heads=4)
    >>> parser(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 16, 32])
    """

    def __init__(
        self, size: int, patch: int, dim: int, depth: int, heads: int, channels: int = 3, **attention: Any
    ) -> None:
        super().__init__()
        for name, value in (("size", size), ("patch", patch), ("dim", dim), ("channels", channels)):
            check_count(name, value)
        check_count("depth", depth, least=0)
        if size % patch:
            raise ValueError(f"patch must divide size: {patch} does not divide {size}")
        self.size = size
        self.patch = patch
        self.dim = dim
        self.channels = channels
        self.tokens = (size // patch) ** 2
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.places = nn.Parameter(0.5 * torch.randn(self.tokens, dim))
        self.encoder = Encoder(dim, depth, heads, **attention) if depth else None

    def forward(self, images: Float[Tensor, "batch c h w"]) -> Float[Tensor, "batch tokens dim"]:
        """Features of the patches, row by row."""
        x = self._embedded(images)
        return x if self.encoder is None else self.encoder(x)

    def with_attention(
        self, images: Float[Tensor, "batch c h w"]
    ) -> tuple[Float[Tensor, "batch tokens dim"], Float[Tensor, "batch tokens tokens"]]:
        """Features, and attention maps of the last layer averaged over heads, without gradients."""
        if self.encoder is None:
            raise ValueError("an encoder of depth 0 has no attention")
        last: Any = self.encoder.blocks[-1]
        x = self._embedded(images)
        for block in self.encoder.blocks[:-1]:
            x = block(x)
        with torch.no_grad():
            maps = last.attention.maps(last.attention_norm(x)).mean(1)
        return self.encoder.norm(last(x)), maps

    def _embedded(self, images: Tensor) -> Tensor:
        shape = (self.channels, self.size, self.size)
        if images.ndim != 4 or images.shape[1:] != shape:
            raise ValueError(f"images must be (batch, {', '.join(map(str, shape))}), got {tuple(images.shape)}")
        return self.patches(images).flatten(2).mT + self.places


def together(
    attention: Float[Tensor, "batch n n"], seeds: Int[Tensor, " batch"], count: int
) -> Bool[Tensor, "batch n"]:
    """`count` patches of each image to mask: its seed, and those that the seed attends to most.

    Features of neighbouring patches overlap: a patch that is masked alone could be copied from them.
    """
    check_count("count", count, least=1, most=attention.shape[-1])
    rows = attention[torch.arange(len(attention), device=attention.device), seeds]
    rows = rows.scatter(1, seeds[:, None], torch.inf)
    return torch.zeros_like(rows, dtype=torch.bool).scatter(1, rows.topk(count, dim=1).indices, True)
