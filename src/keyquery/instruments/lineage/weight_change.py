"""How the weights of queries changed: how far, and whether the change is rounding."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Heads
from keyquery.instruments.lineage.fingerprint import in_halves

BLOCK = 16  # neighbouring weights that share a scale in every common format of quantisation
SAMPLE = 2**16  # weights per layer whose order is compared


class WeightChange(NamedTuple):
    """Medians over layers: ‖ΔWq‖/‖Wq‖, and the inversions relative to those of a random change of equal size."""

    size: float
    inversions: float


@torch.no_grad()
def weight_change(first: Heads, second: Heads) -> WeightChange:
    """The change of Wq from one checkpoint to another of the same shape.

    Rounding keeps the order of weights that share a scale; training and noise do not.
    """
    sizes, ratios = [], []
    generator = torch.Generator().manual_seed(0)
    for before, after in zip(first, second, strict=True):
        if before.kind != "self":
            continue
        old, new = (in_halves(layer)[0].float().flatten(0, -2) for layer in (before, after))
        sizes.append(float((new - old).norm() / old.norm().clamp(min=1e-30)))
        old, new = (rows[:: max(rows.numel() // SAMPLE, 1)] for rows in (old, new))
        change = (new - old).flatten()
        shuffled = old + change[torch.randperm(len(change), generator=generator)].view_as(old)
        ratios.append(inversions(old, new) / max(inversions(old, shuffled), 1))
    return WeightChange(statistics.median(sizes), statistics.median(ratios))


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
