"""How the weights changed: how far each head moved and in which part, and whether the change is rounding."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Heads
from keyquery.instruments.lineage.fingerprint import in_halves
from keyquery.instruments.look.compare import relative_changes, shape_of
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
        if shape_of(before) != shape_of(after):
            return None
        old, new = ([side.float() for side in in_halves(layer)] for layer in (before, after))
        changes = relative_changes(*old, *new)
        for head, values in enumerate(zip(*changes.values(), strict=True)):
            rows.append({"layer": before.index, "head": head, **dict(zip(changes, values, strict=True))})
        queries = old[0].flatten(0, -2), new[0].flatten(0, -2)
        size = float((queries[1] - queries[0]).norm() / queries[0].norm().clamp(min=1e-30))
        if before.kind == "self" and size > 0:
            sizes.append(size)
            ratios.append(_inverted(*queries, generator))
    if not sizes:
        return WeightChange(0.0, 0.0, rows)
    return WeightChange(statistics.median(sizes), statistics.median(ratios), rows)


def _inverted(old: Tensor, new: Tensor, generator: torch.Generator) -> float:
    """Inversions of a sample of rows, relative to those of the same changes in random places."""
    old, new = (rows[:: max(rows.numel() // SAMPLE, 1)] for rows in (old, new))
    change = (new - old).flatten()
    shuffled = old + change[torch.randperm(len(change), generator=generator)].view_as(old)
    return inversions(old, new) / max(inversions(old, shuffled), 1)


def inversions(old: Float[Tensor, "rows columns"], new: Float[Tensor, "rows columns"]) -> int:
    """Neighbours in the order of `old`, within a block of columns, that change places in `new`."""
    columns = old.shape[1] // BLOCK * BLOCK
    old, new = (rows[:, :columns].reshape(-1, BLOCK) for rows in (old, new))
    by_new = new.argsort(-1)
    old, new = old.gather(-1, by_new), new.gather(-1, by_new)
    by_old = old.argsort(dim=-1, stable=True)  # equal values of `old` stay in the order of `new`
    old, new = old.gather(-1, by_old), new.gather(-1, by_old)
    return int(((old.diff() > 0) & (new.diff() < 0)).sum())
