"""Products of the rows of factors with each other."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.kernels import blas

SMALLEST = 32  # rows of a block of a symmetric product: products of fewer are slow


def symmetric_product(factor: Tensor, on_factor: Tensor | None = None) -> Tensor:
    """on_factor @ factorᵀ, which is symmetric, by default factor @ factorᵀ: about half of it is computed on a CPU."""
    if on_factor is None and blas.usable(factor):
        return blas.matmul(factor, factor.mT)
    on_factor = factor if on_factor is None else on_factor
    middle = factor.shape[-2] // 2
    if middle < SMALLEST or factor.device.type != "cpu":
        return on_factor @ factor.mT
    first, last = (slice(None, middle), slice(middle, None))
    corner = on_factor[..., last, :] @ factor[..., first, :].mT
    head, tail = (symmetric_product(factor[..., part, :], on_factor[..., part, :]) for part in (first, last))
    return torch.cat((torch.cat((head, corner.mT), -1), torch.cat((corner, tail), -1)), -2)


def inner(query: Float[Tensor, "*batch r d"], key: Float[Tensor, "*#batch n d"]) -> Float[Tensor, "*batch r n"]:
    """query @ keyᵀ; under GQA queries are multiplied as one tall matrix, since matmul would copy the key."""
    if query.ndim > 2 and query.ndim == key.ndim and key.shape[-3] == 1:
        tall = blas.matmul(query.flatten(-3, -2), key.squeeze(-3).mT)
        return tall.unflatten(-2, query.shape[-3:-1])
    return blas.matmul(query, key.mT)
