"""The network of a SeriesClassifier: convolutional tokens, an encoder, and pooling over segments."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from keyquery.layers import Encoder
from keyquery.layers.kernels import KERNELS
from keyquery.support.checks import check_choice

BINS = 16
KINDS = ("primal+", "primal", *KERNELS)


class SeriesNetwork(nn.Module):
    """Series (batch, n, dims) and which tokens are real (batch, n), to logits of classes.

    Tokens are a convolution of width 3 plus sinusoidal positions; an Encoder follows; the means of its outputs over
    `bins` consecutive segments of each series go through a linear map, like a flatten head for any length
    (identical to it if `bins` is the length). `primal` are further options of `kq.PrimalAttention`.
    Padding does not affect the output.

    >>> network = SeriesNetwork(3, classes=2, width=16, depth=1, heads=2, attention="primal", rank=4)
    >>> network(torch.randn(5, 40, 3), torch.ones(5, 40, dtype=torch.bool)).shape
    torch.Size([5, 2])
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
        **primal: Any,
    ) -> None:
        super().__init__()
        check_choice("attention", attention, KINDS)
        options: dict[str, Any] = {"kernel": attention, "dropout": dropout}
        if attention.startswith("primal"):
            options["primal"] = {"rank": rank, "eta": eta, **primal}
        self.tokens = nn.Conv1d(dims, width, kernel_size=3, padding=1)
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
        x = x + places(x.shape[1], x.shape[2], x.device)
        x = self.encoder(self.dropout(x), real)
        return self.classes(self.dropout((stretches(real, self.bins).to(x.dtype) @ x).flatten(1)))


def places(n: int, width: int, device: torch.device | str = "cpu") -> Float[Tensor, "n width"]:
    """Sinusoidal positions, with wavelengths from 2π to 20,000π, for any length.

    >>> places(3, 4)[0]
    tensor([0., 1., 0., 1.])
    """
    rates = torch.exp(-math.log(1e4) / width * torch.arange(0, width, 2, device=device))
    angles = torch.arange(n, device=device).unsqueeze(1) * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width]


def stretches(real: Bool[Tensor, "batch n"], bins: int) -> Float[Tensor, "batch bins n"]:
    """Weights of the means over `bins` segments of the real tokens of each series, of nearly equal size, none empty.

    Segment b of L tokens is ⌊bL/bins⌋ to ⌈(b + 1)L/bins⌉; in a short series segments overlap.

    >>> stretches(torch.tensor([[True, True, True, False]]), 2)
    tensor([[[0.5000, 0.5000, 0.0000, 0.0000],
             [0.0000, 0.5000, 0.5000, 0.0000]]])
    """
    count, rank = real.sum(1)[:, None, None], (real.cumsum(1) - 1).unsqueeze(1)
    stretch = torch.arange(bins, device=real.device)[:, None]
    first, end = stretch * count // bins, -(-(stretch + 1) * count // bins)
    inside = ((rank >= first) & (rank < end) & real.unsqueeze(1)).float()
    return inside / inside.sum(-1, keepdim=True).clamp(min=1)
