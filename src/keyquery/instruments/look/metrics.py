"""Metrics of QK forms for `look`: per head, and of all heads of a layer together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from keyquery.forms import Form, Rope
from keyquery.forms.measures import column_directionality
from keyquery.forms.offsets import energies
from keyquery.instruments.look.on_data import by_head

OFFSETS = (0, 1, 2, 4, 8, 16, 32, 64)
PIECE = 2**21  # entries of a factor processed at a time: fits the cache


def metrics_of(form: Form, rope: Rope | None = None) -> list[dict[str, Any]]:
    """Metrics of each head, computed for some heads at a time.

    >>> [cell["symmetry"] for cell in metrics_of(Form(torch.ones(2, 1, 3), torch.ones(2, 1, 3)))]
    [1.0, 1.0]
    """
    return [cell for piece in _pieces(form) for cell in _metrics(piece, rope)]


def _pieces(form: Form) -> Iterator[Form]:
    """Some heads at a time, in at least float32, to bound memory."""
    each = math.prod(form.batch[1:]) * form.rank * form.dim
    count = max(PIECE // each, 1)
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

    Query heads that share a key (GQA) are summed first. Row and column norms come from blocks of M in the dtype of the
    weights (rounding of single entries averages out), tr(M²) from KQᵀ.

    >>> round(of_whole_layer(Form(torch.eye(2)[None], torch.eye(2)[None]))["symmetry"], 6)
    1.0
    """
    while form.batch:
        form = form.sum()
    query, key = form.query, form.key
    if form.dtype != torch.bfloat16:  # bfloat16 matmul is native; float16 is slow on CPUs
        query, key = form.working("query"), form.working("key")
    wide = torch.promote_types(form.dtype, torch.float32)
    rows, columns = [], torch.zeros(form.dim, dtype=torch.float64, device=form.device)
    for block in query.split(512, dim=1):
        squares = (block.mT @ key).to(wide).square()
        rows.append(squares.sum(1).double())
        columns += squares.sum(0)
    cross = (key @ query.mT).to(wide)
    energy, trace = columns.sum(), (cross * cross.mT).sum(1).double().sum()
    norms = torch.cat(rows).sqrt(), columns.sqrt()
    kinds = {"column_directionality": "excess", "column_directionality_norms": "norms"}
    ways = {name: column_directionality(*norms, kind=kind).item() for name, kind in kinds.items()}
    return {"symmetry": (trace / torch.where(energy > 0, energy, 1.0)).item(), **ways}
