"""Positions of tokens from ids, masks and caches: functions of tensors alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from keyquery.listening.call import Tokens

Mask = Bool[Tensor, "batch tokens"] | None


def cross_tokens(queries: Mask, keys: Mask, n: int, m: int, device: torch.device) -> Tokens:
    """The tokens of two sequences with their padding, which positions count without."""
    queries, keys = (None if mask is None else mask.to(device) for mask in (queries, keys))
    return Tokens(_counted(queries, n, n, device), _counted(keys, m, m, device), queries, keys)


def self_tokens(ids: Tensor | None, absolute: bool, real: Mask, n: int, m: int, total: int, like: Tensor) -> Tokens:
    """The last n of `total` tokens, which see m keys: a cache may have dropped old ones, or have room.

    `ids` are what the model uses as positions, if that was seen; not `absolute` are those that enter scores as offsets.
    """
    batch, device, shift = len(like), like.device, None
    real = None if real is None or bool(real[:, :total].all()) else real[:, :total].to(device)
    positions = _counted(real, n, total, device) if ids is None else ids.to(device)
    if ids is not None and real is not None and not absolute:
        positions, shift = _from_first(positions, real, n, total)
    keys = positions if n == total else _with_cached(positions, n, total, real)
    queries = None if real is None or n > total else real[:, total - n :]
    if n == total and shift is None:
        positions = keys = _in_one_row(positions, queries)
    if total == m:  # the same tensor at every call, so that what is computed from it can be reused
        return Tokens(positions, keys, queries, real, shift)
    if total < m:
        real = keys.new_ones(batch, total, dtype=torch.bool) if real is None else real
        keys = torch.cat((keys, torch.arange(1, m - total + 1, device=device) + keys[:, -1:]), 1)
    keep = slice(max(total - m, 0), None)
    real = None if real is None else real[:, keep]
    real = None if real is None else pad(real, (0, m - real.shape[1]), value=False)  # free slots hold no token
    return Tokens(positions, keys[:, keep], queries, real, shift)


def so_far(cache: Any, n: int, m: int, real: Mask) -> int:
    """Tokens of a sequence so far, as its cache counts them, or else its mask; m without a cache."""
    if cache is None or not hasattr(cache, "get_seq_length"):
        return m
    total = int(cache.get_seq_length())
    known = total >= n and (real is None or real.shape[1] >= total)
    return total if known else m if real is None else real.shape[1]


def fitting(ids: Tensor | None, batch: int, n: int) -> Shaped[Tensor, "#batch n"] | None:
    """Ids as positions of a call, if they have its shape."""
    if not isinstance(ids, Tensor) or tuple(ids.shape) not in ((n,), (1, n), (batch, n)):
        return None
    return ids.reshape(-1, n) if ids.is_floating_point() else ids.reshape(-1, n).long()


def _in_one_row(positions: Tensor, real: Mask) -> Shaped[Tensor, "#batch n"]:
    """One row for all sequences where they stand alike, which padding does not change: what it gives is reused."""
    alike = _consecutive(0, positions.shape[1], positions.device)
    if positions is alike:  # a comparison would wait for a GPU
        return alike
    same = positions == alike if real is None else (positions == alike) | ~real
    return alike if bool(same.all()) else positions


def _with_cached(positions: Tensor, n: int, total: int, real: Mask) -> Shaped[Tensor, "#batch m"]:
    """Positions of cached keys and of new ones: slots, or real tokens alone, as the first new token counts them."""
    if n > total:
        return positions[:, :total]
    old = total - n
    if real is None:
        return torch.cat((torch.arange(-old, 0, device=positions.device) + positions[:, :1], positions), 1)
    positions, counts = positions.expand(len(real), -1), real.cumsum(1)
    newest = old + real[:, old:].to(torch.uint8).argmax(-1, keepdim=True)
    first = positions.gather(1, newest - old)
    skipped = real.to(torch.uint8).argmax(-1, keepdim=True).where(first != newest, 0)  # padding before the first token
    slots = torch.arange(total, device=real.device) - skipped
    offset = (first - counts.gather(1, newest)).where(real.gather(1, newest), -1)  # a row may have ended
    before = torch.where(first == slots.gather(1, newest), slots, (counts + offset).clamp(min=0))
    return torch.cat((before[:, :old], positions), 1)


def _from_first(ids: Tensor, real: Tensor, n: int, m: int) -> tuple[Shaped[Tensor, "batch n"], Tensor | None]:
    """Ids that are mere slots of left-padded rows, counted from the first real token instead; and what that took."""
    first = real.to(torch.uint8).argmax(-1, keepdim=True)
    slots = (ids == torch.arange(m - n, m, device=ids.device)).all(-1, keepdim=True)
    shift = torch.where(slots, first, 0)
    return (ids - shift, shift) if bool(shift.any()) else (ids, None)


def _counted(real: Mask, n: int, m: int, device: torch.device) -> Int[Tensor, "#batch n"]:
    """Real tokens before each of the last n of m."""
    if real is None:
        return _consecutive(m - n, m, device)
    return (real.to(device).long().cumsum(1) - 1).clamp(min=0)[:, m - n :]


@lru_cache(maxsize=8)
def _consecutive(start: int, end: int, device: torch.device) -> Int[Tensor, "1 n"]:
    """Consecutive positions; cached, so that means rotated to them can be reused."""
    return torch.arange(start, end, device=device)[None]
