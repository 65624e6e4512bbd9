"""Transformations of co-occurrence counts X (n, n).

After "Self-Attention as Distributional Projection" (2025), with directed counts in addition to symmetric ones.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.form import Form
from keyquery.support.checks import check_count, check_float

KINDS = ("counts", "log", "ppmi")


def normed_rows(m: Float[Tensor, "... R R"]) -> Float[Tensor, "... R R"]:
    """M_rs / Σ_t M_rt; a row without any counts stays 0."""
    sums = m.sum(-1, keepdim=True)
    return m / torch.where(sums == 0, 1.0, sums)


def dealt(matrix: Float[Tensor, "n n"], heads: int, rank: int | None = None) -> Form:
    """A matrix split into heads of rank r that sum to its nearest form of rank heads·r: a Form with batch (heads,).

    No form of that rank is nearer (Eckart–Young). Singular values are assigned to heads in turn, so that no head has
    all of the large ones.
    """
    size = len(matrix)
    check_float("matrix", matrix, "n n", n=size)
    check_count("heads", heads, least=1, most=size)
    check_count("rank", rank, least=1, most=size // heads, optional=True)
    count = heads * (size // heads if rank is None else rank)
    u, values, v = torch.linalg.svd(matrix.double())
    root = values[:count].sqrt()
    query, key = ((part * root).mT.unflatten(0, (-1, heads)).transpose(0, 1) for part in (u[:, :count], v[:count].mT))
    return Form(query.to(matrix.dtype).contiguous(), key.to(matrix.dtype).contiguous())
