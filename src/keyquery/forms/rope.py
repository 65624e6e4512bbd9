"""Rotary positions: the score of a query at position m and a key at position n depends on n − m alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from keyquery.forms.display import brief
from keyquery.support.checks import check_count, check_float, check_number


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotation R(t) of the first `dims` dimensions of a head by the angles t·ω, in pairs.

    Pairs are (i, i + dims/2), or (2i, 2i + 1) if `interleaved`; ω_i = base^(−2i/dims) unless `frequencies` are given.
    Dimensions beyond `dims` are not rotated. `factor` multiplies cosine and sine, as YaRN's attention factor does,
    so that rotated scores grow by factor².

    >>> kq.Rope(dims=4).angles(1.0)
    tensor([1.0000, 0.0100], dtype=torch.float64)
    """

    dims: int
    base: float = 10000.0
    interleaved: bool = False
    frequencies: Float[Tensor, pairs] | None = None
    factor: float = 1.0

    def __repr__(self) -> str:
        return brief(self)

    def __post_init__(self) -> None:
        check_count("dims", self.dims, least=2)
        if self.dims % 2:
            raise ValueError(f"dims must be even, since dimensions turn in pairs, got {self.dims}")
        for name in ("base", "factor"):
            check_number(name, getattr(self, name))
        if self.base <= 0:
            raise ValueError(f"base must be positive, got {self.base}")
        if self.frequencies is not None:
            check_float("frequencies", self.frequencies, "pairs", pairs=self.dims // 2)

    def angles(self, position: float | Shaped[Tensor, "*positions"]) -> Float[Tensor, "*positions pairs"]:
        """t·ω for each pair, float64: one more dimension than `position` has."""
        # Where positions are, so that nothing has to wait for a copy.
        device = position.device if isinstance(position, Tensor) else None
        if self.frequencies is None:
            exponents = torch.arange(0, self.dims, 2, dtype=torch.float64, device=device) / self.dims
            frequencies = self.base**-exponents
        else:
            frequencies = self.frequencies.double().to(device)
        position = torch.as_tensor(position, dtype=torch.float64, device=frequencies.device)
        return position.unsqueeze(-1) * frequencies

    def rotate(
        self, x: Float[Tensor, "*#batch r"], position: float | Shaped[Tensor, "*#batch"]
    ) -> Float[Tensor, "*out r"]:
        """R(t)·x for vectors x (..., r); `position` is a number, or a tensor that broadcasts to x's leading shape.

        >>> quarter = kq.Rope(dims=2, frequencies=torch.tensor([torch.pi / 2]))
        >>> quarter.rotate(torch.tensor([1.0, 0.0, 5.0]), 1).round().tolist()
        [-0.0, 1.0, 5.0]
        """
        if x.shape[-1] < self.dims:
            raise ValueError(f"rope turns {self.dims} dimensions, but the head has {x.shape[-1]}")
        angles = self.angles(position).to(x.device)
        cos, sin = (self.factor * angles.cos()).to(x.dtype), (self.factor * angles.sin()).to(x.dtype)
        turned, rest = x[..., : self.dims], x[..., self.dims :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((out, rest.expand(*out.shape[:-1], -1)), dim=-1)
