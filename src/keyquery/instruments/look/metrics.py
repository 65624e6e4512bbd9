"""Metrics of the layers of a model, and of the heads in each, from weights and from what running it gave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.forms import Form, Rope
from keyquery.forms.measures import column_directionality
from keyquery.forms.rope import energies
from keyquery.instruments.look.data import OnData
from keyquery.instruments.look.embeddings import Corpus, Directions
from keyquery.instruments.look.reading import SYMMETRIC, label_head

PSD = 0.95  # share of ‖S‖² from which a symmetric head is PSD
LOW_RANK = 0.25  # effective rank over r up to which a head is of low rank
OFFSETS = (0, 1, 2, 4, 8, 16, 32, 64)
PIECE = 2**20  # entries of a factor processed at a time: fits the cache
PIECE_GPU = 2**26  # half a gigabyte in float64
BLOCK = 512  # rows of a layer's M that are formed at a time
Measured = tuple[dict[str, Any], list[dict[str, Any]]]  # metrics of a layer, and of each of its heads


def measure_layer(
    layer: Layer, heads: Heads, data: OnData, directions: Directions | None, corpus: Corpus | None
) -> Measured:
    """Metrics of the whole layer, and of each head."""
    form = layer.form.to(torch.promote_types(layer.form.dtype, torch.float32))  # once for all that follows
    notes = {"notes": list(layer.notes)} if layer.notes else {}
    about = {"layer": layer.index, "name": layer.name, "kind": layer.kind, **notes}
    raw, folded, on_data = metrics_of(form, layer.rope), metrics_of(layer.folded), data.of_layer(layer, heads)
    cells: list[dict[str, Any]] = [
        {
            **about,
            "head": head,
            "name": f"{layer.name}.{head}",
            "scale": layer.scale,
            "rank": form.rank,
            "raw": raw[head],
            "folded": folded[head],
            **of_head,
            **label_head(raw[head]),
            "properties": properties(raw[head], of_head["on_data"], form.rank),
        }
        for head, of_head in enumerate(on_data)
    ]
    if directions is not None and directions.width == form.dim:
        for cell, described in zip(cells, directions.of(layer.form), strict=True):
            cell |= described
    if corpus is not None and corpus.width == form.dim and layer.kind != "cross":
        for cell, compared in zip(cells, corpus.of(layer), strict=True):
            cell["corpus"] = compared
    return {**about, "causal": layer.causal, "raw": of_whole_layer(form)}, cells


def properties(weights: Mapping[str, Any], on_data: Mapping[str, Any] | None, rank: int) -> list[str]:
    """Further properties of a head: "psd", "low rank 7", "split 12:30" (effective ranks that fit its width)."""
    names = []
    if weights["symmetry"] >= SYMMETRIC and weights["positive_share"] >= PSD:
        names.append("psd")
    if weights["effective_rank"] <= LOW_RANK * rank:
        names.append(f"low rank {max(round(weights['effective_rank']), 1)}")
    if on_data is not None and "effective_rank_symmetric" in on_data:
        symmetric, skew = (round(on_data[f"effective_rank_{part}"]) for part in ("symmetric", "skew"))
        if symmetric + skew <= rank:
            names.append(f"split {symmetric}:{skew}")
    return names


def metrics_of(form: Form, rope: Rope | None = None) -> list[dict[str, Any]]:
    """Metrics of each head, computed for some heads at a time to bound memory."""
    size = math.prod(form.batch[1:]) * form.rank * form.dim
    count = max((PIECE if form.device.type == "cpu" else PIECE_GPU) // size, 1)
    dtype = torch.promote_types(form.dtype, torch.float32)
    pieces = (form[start : start + count].to(dtype) for start in range(0, len(form), count))
    return [cell for piece in pieces for cell in _metrics(piece, rope)]


def _metrics(form: Form, rope: Rope | None) -> list[dict[str, Any]]:
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
    cells = _by_head({name: value.flatten(0, len(form.batch) - 1) for name, value in numbers.items()})
    if rope is None:
        return cells
    gram = form.gram().flatten(0, len(form.batch) - 1)
    split = energies(gram, rope, -torch.tensor(OFFSETS, dtype=torch.float64))
    curves = _by_head({"contents": split.contents_symmetry().mT, "exchange": split.exchange_symmetry().mT})
    offsets = [-offset for offset in OFFSETS]
    return [{**cell, "offsets": {"offset": offsets, **curve}} for cell, curve in zip(cells, curves, strict=True)]


def _by_head(values: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Values by head as one row per head."""
    columns = [value.tolist() for value in values.values()]
    return [dict(zip(values, row, strict=True)) for row in zip(*columns, strict=True)]


def of_whole_layer(form: Form) -> dict[str, float]:
    """Metrics of M = Σ_h M_h over the heads of a layer, formed by some rows at a time; tr(M²) is that of (KQᵀ)²."""
    form = form.to(torch.promote_types(form.dtype, torch.float32 if form.device.type == "cpu" else torch.float64))
    while form.batch:  # query heads that share a key (GQA) are summed first
        form = form.sum()
    rows, columns = [], torch.zeros(form.dim, dtype=torch.float64, device=form.device)
    for block in form.query.split(BLOCK, dim=1):
        squares = (block.mT @ form.key).square()
        rows.append(squares.sum(1).double())
        columns += squares.sum(0)
    cross = form.key @ form.query.mT
    trace, energy = (cross * cross.mT).sum(1).double().sum(), columns.sum()
    norms = torch.cat(rows).sqrt(), columns.sqrt()
    kinds = {"column_directionality": "excess", "column_directionality_norms": "norms"}
    outliers = {name: column_directionality(*norms, kind=kind).item() for name, kind in kinds.items()}
    return {"symmetry": (trace / torch.where(energy > 0, energy, 1.0)).item(), **outliers}
