"""Rotary planes as complex numbers: a rotation multiplies q_p and k_p by a phase."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from keyquery.forms import Rope


def pairs(rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which dimensions are the real and the imaginary part of each plane."""
    every = torch.arange(rope.dims, device=device)
    return (every[0::2], every[1::2]) if rope.interleaved else (every[: rope.dims // 2], every[rope.dims // 2 :])


def plane_rows(gram: Float[Tensor, "*batch n n"], first: Tensor, second: Tensor) -> Complex[Tensor, "*batch pairs 2 2"]:
    """Rows R_p with R_p·R_p* the complex Gram matrix of (q_p, k_p), for every plane p."""
    values, vectors = torch.linalg.eigh(_plane_gram(gram, first, second))
    floor = gram.shape[-1] // 2 * torch.finfo(values.dtype).eps * values[..., -1:].clamp(min=0)
    return vectors * torch.where(values > floor, values, 0.0).sqrt().unsqueeze(-2)


def fill(matrix: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, number: Tensor) -> None:
    """Complex numbers as 2×2 blocks: rows (a, b) are the number times columns (c, d), plane by plane."""
    matrix[..., a, c] = matrix[..., b, d] = number.real
    matrix[..., a, d], matrix[..., b, c] = -number.imag, number.imag


def inverse(rows: Tensor) -> Tensor:
    """The pseudo-inverse of rows V√Λ, whose columns are orthogonal; zero columns stay 0."""
    sizes = rows.abs().square().sum(-2, keepdim=True)
    return (rows / torch.where(sizes > 0, sizes, torch.inf)).mH


def _plane_gram(gram: Tensor, first: Tensor, second: Tensor) -> Complex[Tensor, "*batch pairs 2 2"]:
    """E[u u*] of u = (q_p, k_p), complex, for every plane p; invariant under a joint rotation."""
    rank = gram.shape[-1] // 2
    real, imaginary = (torch.stack((index, index + rank), -1) for index in (first, second))

    def between(rows: Tensor, columns: Tensor) -> Tensor:
        return gram[..., rows.unsqueeze(-1), columns.unsqueeze(-2)]

    same = between(real, real) + between(imaginary, imaginary)
    return torch.complex(same, between(imaginary, real) - between(real, imaginary))
