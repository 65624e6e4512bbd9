"""Wide queries and keys in one pass, as a Triton kernel with the signature of `widen`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keyquery.layers.triton_support import kernel

BLOCK = 32  # tokens per program


@kernel
def _widen(
    query, key, at_query, at_key, swapped_query, swapped_key, gains, wide_query, wide_key,
    heads, m, new, query_batch, query_head, query_row, key_batch, key_head, key_row,
    SHARED: tl.constexpr, ACROSS: tl.constexpr, TURNED: tl.constexpr, PLACED: tl.constexpr,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, some of its tokens: every block of q̃ and k̃, sums in float32."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    inside = (row[:, None] < m) & (column[None, :] < RANK)
    from_query = batch.to(tl.int64) * query_batch + head * query_head + row[:, None].to(tl.int64) * query_row
    from_key = batch.to(tl.int64) * key_batch + head * key_head + row[:, None].to(tl.int64) * key_row
    q = tl.load(query + from_query + column[None, :], mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key + from_key + column[None, :], mask=inside, other=0.0).to(tl.float32)
    own = head if SHARED else tl.program_id(1)  # means at shared positions are stored once
    mean = (own.to(tl.int64) * m + row[:, None]) * RANK + column[None, :]
    mean_q = tl.load(at_query + mean, mask=inside, other=0.0).to(tl.float32)
    mean_k = tl.load(at_key + mean, mask=inside, other=0.0).to(tl.float32)
    symmetric, skew = tl.load(gains + head), tl.load(gains + heads + head)
    popularity, query_only = tl.load(gains + 2 * heads + head), tl.load(gains + 3 * heads + head)
    position = tl.load(gains + 4 * heads + head)
    other_q, other_k = q - mean_q, k - mean_k
    if TURNED:  # contents rotated by the negative angle
        at = (tl.program_id(1).to(tl.int64) * m + row[:, None]) * RANK + column[None, :]
        other_q = tl.load(swapped_query + at, mask=inside, other=0.0).to(tl.float32)
        other_k = tl.load(swapped_key + at, mask=inside, other=0.0).to(tl.float32)
    width = RANK * (1 + ACROSS + PLACED)
    to = (tl.program_id(1).to(tl.int64) * m + row[:, None]) * width + column[None, :]
    kind = wide_key.dtype.element_ty
    tl.store(wide_key + to, (k - mean_k).to(kind), mask=inside)
    if ACROSS:
        tl.store(wide_key + to + RANK, other_q.to(kind), mask=inside)
    if PLACED:
        tl.store(wide_key + to + RANK * (1 + ACROSS), mean_k.to(kind), mask=inside)
    late = inside & (row[:, None] >= m - new)
    to = (tl.program_id(1).to(tl.int64) * new + row[:, None] - (m - new)) * width + column[None, :]
    both = (symmetric + skew) / 2
    tl.store(wide_query + to, (both * (q - mean_q) + popularity * mean_q).to(kind), mask=late)
    if ACROSS:
        tl.store(wide_query + to + RANK, ((symmetric - skew) / 2 * other_k).to(kind), mask=late)
    if PLACED:
        placed = query_only * (q - mean_q) + position * mean_q
        tl.store(wide_query + to + RANK * (1 + ACROSS), placed.to(kind), mask=late)


def widen(
    queries: Tensor,
    keys: Tensor,
    at_query: Tensor,
    at_key: Tensor,
    gains: Tensor,
    new: int,
    across: bool,
    placed: bool,
    swapped: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """q̃ (batch, heads, new, w) and k̃ (batch, heads, m, w)."""
    batch, heads, m, rank = keys.shape
    width = rank * (1 + across + placed)
    queries, keys = (t if t.stride(-1) == 1 else t.contiguous() for t in (queries, keys))
    at_query, at_key = at_query.contiguous(), at_key.contiguous()
    turned = across and swapped is not None
    others = tuple(t.contiguous() for t in swapped) if turned and swapped is not None else (queries, keys)
    wide_query, wide_key = queries.new_empty(batch, heads, new, width), keys.new_empty(batch, heads, m, width)
    _widen[(triton.cdiv(m, BLOCK), batch * heads)](
        queries, keys, at_query, at_key, *others, gains.to(keys.device, torch.float32), wide_query, wide_key,
        heads, m, new, *queries.stride()[:3], *keys.stride()[:3],
        SHARED=len(at_query) == 1 and len(at_key) == 1, ACROSS=across, TURNED=turned, PLACED=placed,
        RANK=rank, PADDED=triton.next_power_of_2(rank), ROWS=BLOCK,
    )  # fmt: skip
    return wide_query, wide_key
