"""Wide queries and keys in one pass, as a Triton kernel: without gradients, for RoPE of all dimensions in halves."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from keyquery.layers.triton_support import blocks, kernel, launch, power_of_two

SIZES = (64, 4)  # tokens and warps per program


@kernel
def _load(x, column, within):
    """A tile in float32, 0 outside."""
    return tl.load(x + column[None, :], mask=within, other=0.0).to(tl.float32)


@kernel
def _store(to, column, value, within):
    tl.store(to + column[None, :], value.to(to.dtype.element_ty), mask=within)


@kernel
def _widen(
    query, key, at_query, at_key, cosine, sine, gains, wide_query, wide_key,
    batches, heads, m, new, query_batch, query_head, query_row, key_batch, key_head, key_row, angle_batch,
    SHARED: tl.constexpr, ACROSS: tl.constexpr, PLACED: tl.constexpr, TURNED: tl.constexpr,
    RANK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, some of its tokens: every block of q̃ and k̃ in two halves, sums in float32."""
    # All sequences of a head run together, since they share its means.
    rest, block = tl.program_id(0) // tl.cdiv(m, ROWS), tl.program_id(0) % tl.cdiv(m, ROWS)
    batch, head, row = (rest % batches).to(tl.int64), (rest // batches).to(tl.int64), block * ROWS + tl.arange(0, ROWS)
    sequence = batch * heads + head
    first, second = tl.arange(0, HALF), tl.arange(0, HALF) + RANK // 2
    inside = (row[:, None] < m) & (first < RANK // 2)[None, :]
    from_query = query + batch * query_batch + head * query_head + row[:, None].to(tl.int64) * query_row
    from_key = key + batch * key_batch + head * key_head + row[:, None].to(tl.int64) * key_row
    of_means = head if SHARED else sequence  # means at shared positions are stored once
    mean = (of_means * m + row[:, None]) * RANK
    mean_q, mean_q2 = _load(at_query + mean, first, inside), _load(at_query + mean, second, inside)
    mean_k, mean_k2 = _load(at_key + mean, first, inside), _load(at_key + mean, second, inside)
    q, q2 = _load(from_query, first, inside) - mean_q, _load(from_query, second, inside) - mean_q2
    k, k2 = _load(from_key, first, inside) - mean_k, _load(from_key, second, inside) - mean_k2
    symmetric, skew = tl.load(gains + head), tl.load(gains + heads + head)
    popularity, query_only = tl.load(gains + 2 * heads + head), tl.load(gains + 3 * heads + head)
    position = tl.load(gains + 4 * heads + head)
    width = RANK * (1 + ACROSS + PLACED)
    to_key = wide_key + (sequence * m + row[:, None]) * width
    to_query = wide_query + (sequence * new + row[:, None] - (m - new)) * width
    late = inside & (row[:, None] >= m - new)
    both = (symmetric + skew) / 2
    _store(to_key, first, k, inside)
    _store(to_key, second, k2, inside)
    _store(to_query, first, both * q + popularity * mean_q, late)
    _store(to_query, second, both * q2 + popularity * mean_q2, late)
    if PLACED:
        last = RANK * (1 + ACROSS)
        _store(to_key + last, first, mean_k, inside)
        _store(to_key + last, second, mean_k2, inside)
        _store(to_query + last, first, query_only * q + position * mean_q, late)
        _store(to_query + last, second, query_only * q2 + position * mean_q2, late)
    if ACROSS:
        if TURNED:  # R(−2t), from the rotation by t to that by −t
            angle = batch * angle_batch + row[:, None].to(tl.int64) * (RANK // 2)
            cos, sin = _load(cosine + angle, first, inside), _load(sine + angle, first, inside)
            q, q2 = q * cos + q2 * sin, q2 * cos - q * sin
            k, k2 = k * cos + k2 * sin, k2 * cos - k * sin
        apart = (symmetric - skew) / 2
        _store(to_key + RANK, first, q, inside)
        _store(to_key + RANK, second, q2, inside)
        _store(to_query + RANK, first, apart * k, late)
        _store(to_query + RANK, second, apart * k2, late)


def widen(
    queries: Tensor,
    keys: Tensor,
    at_query: Tensor,
    at_key: Tensor,
    gains: Tensor,
    new: int,
    across: bool,
    placed: bool,
    turn: Any = None,
) -> tuple[Tensor, Tensor]:
    """q̃ (batch, heads, new, w) and k̃ (batch, heads, m, w)."""
    batch, heads, m, rank = keys.shape
    width = rank * (1 + across + placed)
    queries, keys = (t if t.stride(-1) == 1 else t.contiguous() for t in (queries, keys))
    at_query, at_key = at_query.contiguous(), at_key.contiguous()
    gains = gains.to(keys.device, torch.float32)
    wide_query, wide_key = queries.new_empty(batch, heads, new, width), keys.new_empty(batch, heads, m, width)
    turned = across and turn is not None
    tables = (turn.cos, turn.sin) if turned else (keys, keys)
    apart = tables[0].stride(0) if turned and len(tables[0]) > 1 else 0  # sequences may share their positions
    tensors = (queries, keys, at_query, at_key, *tables, gains, wide_query, wide_key)
    numbers = (batch, heads, m, new, *queries.stride()[:3], *keys.stride()[:3], apart)
    constants = (
        *(("SHARED", len(at_query) == 1 and len(at_key) == 1), ("ACROSS", across), ("PLACED", placed)),
        *(("TURNED", turned), ("RANK", rank), ("HALF", power_of_two(rank // 2)), ("ROWS", SIZES[0])),
        ("num_warps", SIZES[1]),
    )
    launch(_widen, (batch * heads * blocks(m, SIZES[0]), 1), tensors, numbers, constants)
    return wide_query, wide_key
