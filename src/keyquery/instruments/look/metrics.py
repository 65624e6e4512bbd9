"""Metrics of QK forms for `look`: per head, and of all heads of a layer together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms import Form, Rope
from keyquery.forms.measures import column_directionality
from keyquery.forms.rope import energies
from keyquery.instruments.look.on_data import by_head

OFFSETS = (0, 1, 2, 4, 8, 16, 32, 64)
PIECE = 2**20  # entries of a factor processed at a time: fits the cache
BLOCK = 512  # rows of a matrix d × d that are squared at a time
WIDEST = 4096  # d of such a matrix that is kept
PIECE_GPU = 2**26  # half a gigabyte in float64


def metrics_of(form: Form, rope: Rope | None = None) -> list[dict[str, Any]]:
    """Metrics of each head, computed for some heads at a time."""
    return [cell for piece in _pieces(form) for cell in _metrics(piece, rope)]


def _pieces(form: Form) -> Iterator[Form]:
    """Some heads at a time, in at least float32, to bound memory."""
    each = math.prod(form.batch[1:]) * form.rank * form.dim
    count = max((PIECE if form.device.type == "cpu" else PIECE_GPU) // each, 1)
    dtype = torch.promote_types(form.dtype, torch.float32)
    return (form[start : start + count].to(dtype) for start in range(0, len(form), count))


def _metrics(form: Form, rope: Rope | None = None) -> list[dict[str, Any]]:
    """Metrics of each head in one view, with curves over offsets under RoPE."""
    symmetric, skew = form.core().energies
    rows, columns = form.row_norms(), form.column_norms()
    numbers = {
        "symmetry": form.symmetry,
        "column_directionality": column_directionality(rows, columns),
        "column_directionality_norms": column_directionality(rows, columns, kind="norms"),
        "symmetric_energy": symmetric,
        "skew_energy": skew,
        "positive_share": form.positive_share,
        "effective_rank": form.effective_rank(),
        "stable_rank": form.stable_rank(),
        "eigenvalues": form.symmetric_eigenvalues(),
        "skew_values": form.skew_values(),
        "singular_values": form.singular_values(),
    }
    cells = by_head(numbers, len(form.batch))
    if rope is None:
        return cells
    gram = form.gram().flatten(0, len(form.batch) - 1)
    at = energies(gram, rope, -torch.tensor(OFFSETS, dtype=torch.float64))
    curves = by_head({"contents": at.contents_symmetry().mT, "exchange": at.exchange_symmetry().mT}, 1)
    offsets = [-offset for offset in OFFSETS]
    return [{**cell, "offsets": {"offset": offsets, **curve}} for cell, curve in zip(cells, curves, strict=True)]


def of_whole_layer(form: Form) -> dict[str, float]:
    """Metrics of M = Σ_h M_h, the sum over the heads of a layer, as published for whole layers.

    Query heads that share a key (GQA) are summed first. Norms of rows and columns are in float32 on a CPU, in float64
    on a GPU; tr(M²) is that of (KQᵀ)² where the heads have few rows, or M is large.
    """
    least = torch.float32 if form.device.type == "cpu" else torch.float64
    form = form.to(torch.promote_types(form.dtype, least))
    while form.batch:
        form = form.sum()
    rows, columns, trace = _whole(form.query, form.key)
    energy = columns.sum()
    norms = rows.sqrt(), columns.sqrt()
    kinds = {"column_directionality": "excess", "column_directionality_norms": "norms"}
    ways = {name: column_directionality(*norms, kind=kind).item() for name, kind in kinds.items()}
    return {"symmetry": (trace / torch.where(energy > 0, energy, 1.0)).item(), **ways}


def _whole(query: Float[Tensor, "r d"], key: Float[Tensor, "r d"]) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms of the rows and of the columns of M = QᵀK, and tr(M²), float64."""
    dim = query.shape[1]
    if 2 * len(query) <= dim or dim > WIDEST:
        cross = key @ query.mT
        return _square_norms(query, key), _square_norms(key, query), (cross * cross.mT).sum(1).double().sum()
    matrix = query.mT @ key
    rows, columns, traces = [], torch.zeros(dim, dtype=torch.float64, device=query.device), []
    for block, turned in zip(matrix.split(BLOCK), matrix.mT.split(BLOCK), strict=True):
        square = block.square()
        rows.append(square.sum(1).double())
        columns += square.sum(0)
        traces.append((block * turned).sum(1).double().sum())
    return torch.cat(rows), columns, torch.stack(traces).sum()


def _square_norms(factor: Float[Tensor, "r d"], other: Float[Tensor, "r e"]) -> Float[Tensor, " d"]:
    """Squared norms of the rows of factorᵀ·other, float64: from other = L·(orthonormal), or from blocks of the product.

    L is lower triangular, so that the first needs 5/8 of the products of L and the factor; it pays where r is small
    against e.
    """
    if 2 * len(other) <= other.shape[1]:
        lower, failed = torch.linalg.cholesky_ex(other @ other.mT)
        pivots = lower.diagonal()
        if not failed and pivots.amin() > 1e-2 * pivots.amax():  # else rounding may show
            parts = lower.split(max(len(lower) // 4, 1), dim=1)
            starts = accumulate((part.shape[1] for part in parts), initial=0)
            products = (part[start:].mT @ factor[start:] for part, start in zip(parts, starts, strict=False))
            return sum((product.square().sum(0).double() for product in products), torch.zeros(()))
    return torch.cat([(block.mT @ other).square().sum(1).double() for block in factor.split(BLOCK, dim=1)])
