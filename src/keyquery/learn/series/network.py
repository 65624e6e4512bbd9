"""The network of a SeriesClassifier: convolutional tokens, an encoder, and pooling over segments."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu

from keyquery.layers import Encoder
from keyquery.layers.kernels import KERNELS

BINS = 16
WIDTHS = (3, 9, 27)  # of the convolutions of multiscale tokens
MAX_TOKENS = 64  # tokens of a series after multiscale convolutions
TOKENS = ("multiscale", "plain")
KINDS = ("primal+", "primal", *KERNELS)


class SeriesNetwork(nn.Module):
    """Series (batch, n, dims) and which tokens are real (batch, n), to logits of classes.

    Tokens are a convolution of width 3 plus sinusoidal positions, or "multiscale": convolutions of several widths whose
    sum with the positions is averaged over at most 64 segments. An Encoder follows; the means of its outputs over
    `bins` segments of each series go through a linear map, like a flatten head for any length.
    """

    def __init__(
        self,
        dims: int,
        classes: int,
        width: int,
        depth: int,
        heads: int,
        attention: str,
        rank: int | None = None,
        eta: float = 0.1,
        dropout: float = 0.0,
        bins: int = BINS,
        tokens: str = "plain",
        **primal: Any,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"kernel": attention, "dropout": dropout}
        if attention.startswith("primal"):
            options["primal"] = {"rank": rank, "eta": eta, **primal}
        self.pooled = tokens == "multiscale"
        self.tokens = Multiscale(dims, width) if self.pooled else nn.Conv1d(dims, width, kernel_size=3, padding=1)
        self.encoder = Encoder(width, depth, heads, **options)
        self.dropout = nn.Dropout(dropout)
        self.bins = bins
        self.classes = nn.Linear(bins * width, classes)

    def forward(
        self, values: Float[Tensor, "batch n dims"], real: Bool[Tensor, "batch n"]
    ) -> Float[Tensor, "batch classes"]:
        """Logits."""
        values = values.where(real.unsqueeze(-1), 0.0)
        x = self.tokens(values.mT).mT
        x = x + sinusoids(x.shape[1], x.shape[2], x.device)
        if self.pooled:
            weights = stretches(real, real.sum(1).clamp(max=MAX_TOKENS))
            x, real = weights.to(x.dtype) @ x, weights.any(-1)
        x = self.encoder(self.dropout(x), real)
        return self.classes(self.dropout((stretches(real, self.bins).to(x.dtype) @ x).flatten(1)))


class Multiscale(nn.Module):
    """Convolutions of several widths side by side, and a linear map of what they find."""

    def __init__(self, dims: int, width: int) -> None:
        super().__init__()
        channels = max(width // len(WIDTHS), 1)
        self.scales = nn.ModuleList(nn.Conv1d(dims, channels, size, padding=size // 2) for size in WIDTHS)
        self.mix = nn.Conv1d(channels * len(WIDTHS), width, 1)

    def forward(self, values: Float[Tensor, "batch dims n"]) -> Float[Tensor, "batch width n"]:
        """Features of every time step."""
        return self.mix(gelu(torch.cat([scale(values) for scale in self.scales], 1)))


def sinusoids(n: int, width: int, device: torch.device | str = "cpu") -> Float[Tensor, "n width"]:
    """Sinusoidal positions, with wavelengths from 2π to 20,000π, for any length."""
    rates = torch.exp(-math.log(1e4) / width * torch.arange(0, width, 2, device=device))
    angles = torch.arange(n, device=device).unsqueeze(1) * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width]


def stretches(real: Bool[Tensor, "batch n"], bins: int | Int[Tensor, " batch"]) -> Float[Tensor, "batch bins n"]:
    """Weights of the means over `bins` segments of the real tokens of each series, of nearly equal size, none empty.

    Segment b of L tokens is ⌊bL/bins⌋ to ⌈(b + 1)L/bins⌉; in a short series segments overlap.
    """
    count, rank = real.sum(1)[:, None, None], (real.cumsum(1) - 1).unsqueeze(1)
    sizes = torch.as_tensor(bins, device=real.device).expand(len(real))[:, None, None]
    stretch = torch.arange(int(sizes.max()), device=real.device)[:, None]
    first, end = stretch * count // sizes, -(-(stretch + 1) * count // sizes)
    inside = ((rank >= first) & (rank < end) & (stretch < sizes) & real.unsqueeze(1)).float()
    return inside / inside.sum(-1, keepdim=True).clamp(min=1)
