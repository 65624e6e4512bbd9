"""Positions of tokens from ids, masks and caches: functions of tensors alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor, nn


def in_one_row(positions: Tensor, real: Tensor | None) -> Shaped[Tensor, "#batch n"]:
    """One row for all sequences where they stand alike, which padding does not change: what it gives is reused."""
    alike = _consecutive(0, positions.shape[1], positions.device)
    if positions is alike:  # a comparison would wait for a GPU
        return alike
    same = positions == alike if real is None else (positions == alike) | ~real
    return alike if bool(same.all()) else positions


def so_far(cache: Any, n: int, m: int, real: Tensor | None) -> int:
    """Tokens of a sequence so far, as its cache counts them, or else its mask; m without a cache."""
    if cache is None or not hasattr(cache, "get_seq_length"):
        return m
    total = int(cache.get_seq_length())
    known = total >= n and (real is None or real.shape[1] >= total)
    return total if known else m if real is None else real.shape[1]


def with_free_slots(real: Tensor, m: int) -> Bool[Tensor, "batch m"]:
    """A mask with free slots of a cache, which hold no token."""
    return nn.functional.pad(real, (0, m - real.shape[1]), value=False)


def key_positions(positions: Tensor, n: int, m: int, real: Tensor | None) -> Shaped[Tensor, "#batch m"]:
    """Positions of cached keys and of new ones, counted back from the first new token.

    Where positions are slots, padding between is counted, too; else real tokens alone.
    """
    if n > m:
        return positions[:, :m]
    old = m - n
    before = torch.arange(-old, 0, device=positions.device) + positions[:, :1]
    if real is not None:
        first = real[:, old:].to(torch.uint8).argmax(-1, keepdim=True)  # padding has no position to count from
        counts = real.cumsum(1)
        new = positions.expand(len(real), -1)
        anchor = new.gather(1, first) - counts[:, old:].gather(1, first)
        anchor = anchor.where(real[:, old:].any(-1, keepdim=True), -1)  # a row that has ended
        by_count = counts[:, :old] + anchor
        before = torch.where(_are_slots(new, real, n, m), before, by_count.clamp(min=0))
    return torch.cat((before, positions.expand(len(before), -1)), 1)


def _are_slots(ids: Tensor, real: Tensor, n: int, m: int) -> Bool[Tensor, "#batch 1"]:
    """Which rows count slots, padding included, from the first slot or from the first real token."""
    slots = torch.arange(m - n, m, device=ids.device)
    first = real.to(torch.uint8).argmax(-1, keepdim=True)
    return (ids == slots).all(-1, keepdim=True) | (ids == slots - first).all(-1, keepdim=True)


def fitting(ids: Tensor | None, batch: int, n: int) -> Shaped[Tensor, "#batch n"] | None:
    """Ids as positions of a call, if they have its shape."""
    if not isinstance(ids, Tensor) or tuple(ids.shape) not in ((n,), (1, n), (batch, n)):
        return None
    return ids.reshape(-1, n) if ids.is_floating_point() else ids.reshape(-1, n).long()


def from_first(
    ids: Tensor, real: Tensor, n: int, m: int
) -> tuple[Shaped[Tensor, "batch n"], Int[Tensor, "batch 1"] | None]:
    """Ids that are mere slots of left-padded rows, counted from the first real token instead; and what that took."""
    first = real.to(torch.uint8).argmax(-1, keepdim=True)
    slots = (ids == torch.arange(m - n, m, device=ids.device)).all(-1, keepdim=True)
    shift = torch.where(slots, first, 0)
    return (ids - shift, shift) if bool(shift.any()) else (ids, None)


def counted(real: Tensor | None, n: int, m: int, device: torch.device) -> Int[Tensor, "#batch n"]:
    """Real tokens before each of the last n of m."""
    if real is None:
        return _consecutive(m - n, m, device)
    return (real.to(device).long().cumsum(1) - 1).clamp(min=0)[:, m - n :]


@lru_cache(maxsize=8)
def _consecutive(start: int, end: int, device: torch.device) -> Int[Tensor, "1 n"]:
    """Consecutive positions; cached, so that means rotated to them can be reused."""
    return torch.arange(start, end, device=device)[None]
