"""Rotary position embedding (RoPE)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from keyquery.forms.display import brief
from keyquery.support.checks import check_count, check_float, check_number


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding: rotation R(t) of pairs of dimensions of a head by the angles t·ω.

        (R(m) q)·(R(n) k) = qᵀR(n − m)k,   ω_i = base^(−2i/dims)

    Parameters
    ----------
    dims
        Number of rotated dimensions, even; dimensions beyond are unchanged.
    base
        Default: 10000.
    interleaved
        Pairs are (2i, 2i + 1), not (i, i + dims/2). Default: False.
    frequencies
        ω (dims/2,). Default: base^(−2i/dims).
    factor
        Multiplies cosine and sine, as the attention factor of YaRN: scores grow by factor². Default: 1.

    See Also
    --------
    Attention : takes it as `rope=`.

    Examples
    --------
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
            raise ValueError(f"dims must be even, since dimensions are rotated in pairs, got {self.dims}")
        for name in ("base", "factor"):
            check_number(name, getattr(self, name))
        if self.base <= 0:
            raise ValueError(f"base must be positive, got {self.base}")
        if self.frequencies is not None:
            check_float("frequencies", self.frequencies, "pairs", pairs=self.dims // 2)

    def angles(self, position: float | Shaped[Tensor, "*positions"]) -> Float[Tensor, "*positions pairs"]:
        """t·ω per pair, in float64, with one more dimension than `position`."""
        # On the device of the positions, to avoid a copy.
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
        return self._turned(x, self.angles(position))

    def back(
        self, x: Float[Tensor, "*#batch r"], position: float | Shaped[Tensor, "*#batch"]
    ) -> Float[Tensor, "*out r"]:
        """R(−t)·x, likewise.

        >>> rope, x = kq.Rope(dims=2), torch.tensor([1.0, 0.0])
        >>> torch.allclose(rope.back(rope.rotate(x, 3), 3), x)
        True
        """
        return self._turned(x, -self.angles(position))

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        """Pairs of dimensions turned by their angles."""
        if x.shape[-1] < self.dims:
            raise ValueError(f"rope rotates {self.dims} dimensions, but the head has {x.shape[-1]}")
        angles = angles.to(x.device)
        cos, sin = (self.factor * angles.cos()).to(x.dtype), (self.factor * angles.sin()).to(x.dtype)
        rotated, rest = x[..., : self.dims], x[..., self.dims :]
        if self.interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = rotated.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((out, rest.expand(*out.shape[:-1], -1)), dim=-1)
