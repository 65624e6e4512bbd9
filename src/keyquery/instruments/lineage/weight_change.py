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
from keyquery.instruments.lineage.fingerprint import in_halves
from keyquery.support.progress import Progress, silent

BLOCK = 16  # neighbouring weights that share a scale in every common format of quantisation
SAMPLE = 2**16  # weights per layer whose order is compared


@dataclass(frozen=True)
class WeightChange:
    """Medians over layers: ‖ΔWq‖/‖Wq‖, and the inversions relative to those of a random change of equal size."""

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
        for head, (change, symmetric, skew) in enumerate(_moved(*old, *new)):
            place = {"layer": before.index, "head": head}
            rows.append({**place, "change": change, "symmetric": symmetric, "skew": skew})
        if before.kind == "self":
            size, ratio = _queries(old[0].flatten(0, -2), new[0].flatten(0, -2), generator)
            sizes.append(size)
            ratios.append(ratio)
    return WeightChange(statistics.median(sizes), statistics.median(ratios), rows)


def _queries(old: Tensor, new: Tensor, generator: torch.Generator) -> tuple[float, float]:
    size = float((new - old).norm() / old.norm().clamp(min=1e-30))
    old, new = (rows[:: max(rows.numel() // SAMPLE, 1)] for rows in (old, new))
    change = (new - old).flatten()
    shuffled = old + change[torch.randperm(len(change), generator=generator)].view_as(old)
    return size, inversions(old, new) / max(inversions(old, shuffled), 1)


def _moved(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor) -> list[tuple[float | None, ...]]:
    """‖ΔM‖, ‖ΔS‖ and ‖ΔA‖ over ‖M‖ of each head: ΔM = ΔQᵀK₂ + Q₁ᵀΔK = LᵀR, which is never formed.

    ‖LᵀR‖² = Σ (LLᵀ)∘(RRᵀ) and ⟨LᵀR, RᵀL⟩ = Σ (LRᵀ)∘(RLᵀ): differences first, so that small changes keep their digits.
    """
    r = q1.shape[-2]
    left, right = torch.cat((q2 - q1, q1), -2), torch.cat((k2, k2 - k1), -2)
    own = left @ left.mT
    cross = (left.flatten(-3, -2) @ right.squeeze(-3).mT).unflatten(-2, left.shape[-3:-1])
    norm = (own[..., r:, r:].double() * (k1 @ k1.mT)).sum((-2, -1))
    total = (own.double() * (right @ right.mT)).sum((-2, -1))
    turned = (cross.double() * cross.mT).sum((-2, -1))
    parts = torch.stack((total, (total + turned) / 2, (total - turned) / 2), -1).clamp(min=0)
    return [
        tuple(None if not size else math.sqrt(part / size) for part in row)
        for row, size in zip(parts.flatten(0, -2).tolist(), norm.flatten().tolist(), strict=True)
    ]


def inversions(old: Float[Tensor, "rows columns"], new: Float[Tensor, "rows columns"]) -> int:
    """Neighbours in the order of `old`, within a block of columns, that change places in `new`.

    >>> inversions(torch.arange(16.0)[None], torch.arange(16.0)[None].round(decimals=-1))
    0
    """
    columns = old.shape[1] // BLOCK * BLOCK
    old, new = (rows[:, :columns].reshape(-1, BLOCK) for rows in (old, new))
    by_new = new.argsort(-1)
    old, new = old.gather(-1, by_new), new.gather(-1, by_new)
    by_old = old.argsort(dim=-1, stable=True)  # equal values of `old` stay in the order of `new`
    old, new = old.gather(-1, by_old), new.gather(-1, by_old)
    return int(((old.diff() > 0) & (new.diff() < 0)).sum())
