"""How the weights changed: how far each head moved and in which part, and whether the change is rounding."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Heads
from keyquery.forms.core import inner
from keyquery.instruments.lineage.fingerprint import in_halves
from keyquery.support.progress import Progress, silent

BLOCK = 16  # neighbouring weights that share a scale in every common format of quantisation
SAMPLE = 2**16  # weights per layer whose order is compared


@dataclass(frozen=True)
class WeightChange:
    """Medians over layers whose queries changed, since a fine-tune may freeze others.

    `size` is ‖ΔWq‖/‖Wq‖, `inversions` are relative to those of a random change of equal size.
    """

    size: float
    inversions: float
    rows: list[dict[str, Any]]  # per head: ‖ΔM‖, ‖ΔS‖ and ‖ΔA‖ over ‖M‖, None where ‖M‖ is 0


@torch.no_grad()
def weight_change(first: Heads, second: Heads, progress: Progress | None = None) -> WeightChange | None:
    """The change from one checkpoint to another; None if their shapes differ.

    Rounding keeps the order of weights that share a scale; training and noise do not. Norms are in float32: below 1e-3
    a change of M is rounding where weights differ, and exact where they do not. `kq.compare` computes in float64.
    """
    sizes, ratios, rows = [], [], []
    generator = torch.Generator().manual_seed(0)
    if len(first) != len(second):
        return None
    pairs = zip(first, second, strict=True)
    for before, after in (progress or silent)(pairs, "comparing layers", len(first)):
        old, new = ([side.float() for side in in_halves(layer)] for layer in (before, after))
        if [side.shape for side in old] != [side.shape for side in new] or before.kind != after.kind:
            return None
        size, moved = _moved(*old, *new)
        for head, (change, symmetric, skew) in enumerate(moved):
            place = {"layer": before.index, "head": head}
            rows.append({**place, "change": change, "symmetric": symmetric, "skew": skew})
        if before.kind == "self" and size > 0:
            sizes.append(size)
            ratios.append(_inverted(old[0].flatten(0, -2), new[0].flatten(0, -2), generator))
    if not sizes:
        return WeightChange(0.0, 0.0, rows)
    return WeightChange(statistics.median(sizes), statistics.median(ratios), rows)


def _inverted(old: Tensor, new: Tensor, generator: torch.Generator) -> float:
    """Inversions of a sample of rows, relative to those of the same changes in random places."""
    old, new = (rows[:: max(rows.numel() // SAMPLE, 1)] for rows in (old, new))
    change = (new - old).flatten()
    shuffled = old + change[torch.randperm(len(change), generator=generator)].view_as(old)
    return inversions(old, new) / max(inversions(old, shuffled), 1)


def _moved(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor) -> tuple[float, list[tuple[float | None, ...]]]:
    """‖ΔQ‖/‖Q‖; ‖ΔM‖, ‖ΔS‖ and ‖ΔA‖ over ‖M‖ of each head: ΔM = ΔQᵀK₂ + Q₁ᵀΔK = LᵀR, which is never formed.

    ‖LᵀR‖² = Σ (LLᵀ)∘(RRᵀ) and ⟨LᵀR, RᵀL⟩ = Σ (LRᵀ)∘(RLᵀ), with L = [ΔQ; Q₁] and R = [K₂; ΔK] in blocks: differences
    first, so that small changes keep their digits.
    """
    dq, dk = q2 - q1, k2 - k1
    own, moved = q1 @ q1.mT, dq @ dq.mT
    norm = _sum(own, k1 @ k1.mT)
    total = _sum(moved, k2 @ k2.mT) + _sum(own, dk @ dk.mT)
    total += 2 * _sum(dq @ q1.mT, k2 @ dk.mT)
    keys = torch.cat((k2, dk), -2)
    (dq_k2, dq_dk), (q1_k2, q1_dk) = (inner(query, keys).chunk(2, -1) for query in (dq, q1))
    turned = _sum(dq_k2, dq_k2.mT) + 2 * _sum(dq_dk, q1_k2.mT) + _sum(q1_dk, q1_dk.mT)
    parts = torch.stack((total, (total + turned) / 2, (total - turned) / 2), -1).clamp(min=0)
    traces = [float(gram.diagonal(dim1=-2, dim2=-1).double().sum()) for gram in (moved, own)]
    return math.sqrt(traces[0] / max(traces[1], 1e-300)), [
        tuple(None if not size else math.sqrt(part / size) for part in row)
        for row, size in zip(parts.flatten(0, -2).tolist(), norm.flatten().tolist(), strict=True)
    ]


def _sum(first: Tensor, second: Tensor) -> Float[Tensor, "*heads"]:
    """⟨first, second⟩ of each head; float64, since terms of `turned` cancel."""
    return (first.double() * second).sum((-2, -1))


def inversions(old: Float[Tensor, "rows columns"], new: Float[Tensor, "rows columns"]) -> int:
    """Neighbours in the order of `old`, within a block of columns, that change places in `new`."""
    columns = old.shape[1] // BLOCK * BLOCK
    old, new = (rows[:, :columns].reshape(-1, BLOCK) for rows in (old, new))
    by_new = new.argsort(-1)
    old, new = old.gather(-1, by_new), new.gather(-1, by_new)
    by_old = old.argsort(dim=-1, stable=True)  # equal values of `old` stay in the order of `new`
    old, new = old.gather(-1, by_old), new.gather(-1, by_old)
    return int(((old.diff() > 0) & (new.diff() < 0)).sum())
