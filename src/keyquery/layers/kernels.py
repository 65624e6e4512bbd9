"""Attention kernels: queries computed from the keys' projection z = Wx, so that the QK form is structured.

The score of x and y is (C z(x))·z(y), the form M = WᵀCᵀW. C is applied to the query, so that GQA can share one z.
With RoPE, C commutes with every rotation, which keeps score(i, j) = ±score(j, i).
"""

from __future__ import annotations

import math
from difflib import get_close_matches

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from keyquery.forms import Rope
from keyquery.support.checks import check_count

KERNELS = ("general", "symmetric", "psd", "rbf", "skew", "split", "pairwise")
GROUPED = ("general", "pairwise", "symmetric")  # kernels that support GQA: heads that share keys stay distinct


class Diagonal(nn.Module):
    """C = D, a learned diagonal per head: M = WᵀDW is symmetric, and indefinite if D has negative entries.

    With RoPE both dimensions of a pair have the same entry.
    """

    def __init__(self, heads: int, dims: int, rope: Rope | None = None) -> None:
        super().__init__()
        self.rope = rope
        turned = 0 if rope is None else min(rope.dims, dims)
        self.gain = nn.Parameter(torch.ones(heads, dims - turned // 2))

    def forward(self, z: Float[Tensor, "*batch heads n dims"]) -> Float[Tensor, "*batch heads n dims"]:
        """D z, head by head."""
        return z * self.diagonal().unsqueeze(-2).to(z.dtype)

    def diagonal(self) -> Float[Tensor, "heads dims"]:
        """D, with the tied entries expanded."""
        if self.rope is None:
            return self.gain
        pairs = self.rope.dims // 2
        tied, free = self.gain[:, :pairs], self.gain[:, pairs:]
        twice = tied.repeat_interleave(2, -1) if self.rope.interleaved else torch.cat((tied, tied), -1)
        return torch.cat((twice, free), -1)


class Turn(nn.Module):
    """C = Jᵀ with J = [[0, I], [−I, 0]]: M = WᵀJW is skew. With RoPE, J acts within the rotated pairs."""

    def __init__(self, dims: int, rope: Rope | None = None) -> None:
        super().__init__()
        if dims % 2:
            raise ValueError(f"a skew part needs an even number of dimensions, got {dims}")
        self.rope = rope

    def forward(self, z: Float[Tensor, "*batch n dims"]) -> Float[Tensor, "*batch n dims"]:
        """Jᵀz: (a, b) becomes (−b, a) in every pair."""
        if self.rope is None:
            return _turn(z)
        turned, rest = z[..., : self.rope.dims], z[..., self.rope.dims :]
        turned = _turn(turned, self.rope.interleaved)
        return turned if rest.shape[-1] == 0 else torch.cat((turned, _turn(rest)), -1)


class Split(nn.Module):
    """Some dimensions symmetric, the rest skew: M = S + A with a chosen rank of each part.

    Without RoPE the first `symmetric` dimensions are symmetric. With RoPE the first symmetric/2 rotated pairs are.
    """

    def __init__(self, heads: int, dims: int, symmetric: int, rope: Rope | None = None) -> None:
        super().__init__()
        if (dims - symmetric) % 2 or (rope is not None and symmetric % 2):
            raise ValueError(f"symmetric_dims = {symmetric} of {dims} leaves an odd number of skew dimensions")
        if rope is not None and rope.dims != dims:
            raise ValueError(f"a split kernel needs all {dims} dimensions of a head rotated, not {rope.dims}")
        self.symmetric, self.rope = symmetric, rope
        self.gain = nn.Parameter(torch.ones(heads, symmetric if rope is None else symmetric // 2))

    def forward(self, z: Float[Tensor, "*batch heads n dims"]) -> Float[Tensor, "*batch heads n dims"]:
        """(D z₁, Jᵀz₂)."""
        gain = self.gain.unsqueeze(-2).to(z.dtype)
        if self.rope is None:
            return torch.cat((z[..., : self.symmetric] * gain, _turn(z[..., self.symmetric :])), -1)
        first, second = (z[..., 0::2], z[..., 1::2]) if self.rope.interleaved else z.chunk(2, -1)
        pairs = self.symmetric // 2
        a = torch.cat((first[..., :pairs] * gain, -second[..., pairs:]), -1)
        b = torch.cat((second[..., :pairs] * gain, first[..., pairs:]), -1)
        return torch.stack((a, b), -1).flatten(-2) if self.rope.interleaved else torch.cat((a, b), -1)


class Pairwise(nn.Module):
    """C = Pᵀ, a learned matrix per head: M = WᵀPW, any form whose row and column space are the same."""

    def __init__(self, heads: int, dims: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(heads, dims, dims) / math.sqrt(dims))

    def forward(self, z: Float[Tensor, "*batch heads n dims"]) -> Float[Tensor, "*batch heads n dims"]:
        """Pᵀz, head by head."""
        if not z.is_cuda:
            return z @ self.matrix.to(z.dtype)
        # One block-diagonal product: more arithmetic, but on a GPU faster than many small ones.
        flat = z.transpose(-3, -2).flatten(-2)
        out = linear(flat, torch.block_diag(*self.matrix.mT.to(z.dtype)))
        return out.unflatten(-1, (z.shape[-3], z.shape[-1])).transpose(-3, -2)


def make(kernel: str, heads: int, dims: int, symmetric_dims: int | float, rope: Rope | None) -> nn.Module | None:
    """The module that computes queries from z; None for `general`, which has a query projection."""
    match kernel:
        case "general":
            return None
        case "symmetric":
            return Diagonal(heads, dims, rope)
        case "psd" | "rbf":
            return nn.Identity()  # C = I: query and key are the same vector, M = WᵀW ⪰ 0
        case "skew":
            return Turn(dims, rope)
        case "split":
            return Split(heads, dims, _count(symmetric_dims, dims), rope)
        case "pairwise":
            return Pairwise(heads, dims)
    near = get_close_matches(str(kernel).lower(), KERNELS, n=2, cutoff=0.4)
    guess = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    raise ValueError(f"there is no kernel {kernel!r}{guess} Known: {', '.join(KERNELS)}")


def _count(symmetric_dims: int | float, dims: int) -> int:
    """Number of symmetric dimensions per head; a share is rounded to pairs."""
    if isinstance(symmetric_dims, bool) or not isinstance(symmetric_dims, (int, float)):
        raise TypeError(f"symmetric_dims must be a number or a share, got {type(symmetric_dims).__name__}")
    share = isinstance(symmetric_dims, float)
    if not 0 <= symmetric_dims <= (1 if share else dims):
        raise ValueError(
            f"symmetric_dims must be a share from 0 to 1, or from 0 to {dims} dimensions, got {symmetric_dims}"
        )
    return 2 * round(symmetric_dims * dims / 2) if share else int(symmetric_dims)


def _turn(z: Tensor, interleaved: bool = False) -> Tensor:
    if interleaved:
        return torch.stack((-z[..., 1::2], z[..., 0::2]), -1).flatten(-2)
    first, second = z.chunk(2, -1)
    return torch.cat((-second, first), -1)


def checked_head_dim(
    dim: int, heads: int, kv_heads: int, head_dim: int | None, dropout: float, rope: Rope | None
) -> int:
    """Head dimension r, after validating all sizes."""
    for name, value in (("dim", dim), ("heads", heads), ("kv_heads", kv_heads)):
        check_count(name, value, least=1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads: {kv_heads} does not divide {heads}")
    if head_dim is None:
        if dim % heads:
            raise ValueError(f"heads must divide dim unless head_dim is set: {heads} does not divide {dim}")
        head_dim = dim // heads
    check_count("head_dim", head_dim, least=1)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be from 0 to below 1, got {dropout}")
    if rope is not None and not isinstance(rope, Rope):
        raise TypeError(f"rope must be a kq.Rope or None, got {type(rope).__name__}")
    if rope is not None and rope.dims > head_dim:
        raise ValueError(f"rope rotates {rope.dims} dimensions, but a head has {head_dim}")
    return head_dim
