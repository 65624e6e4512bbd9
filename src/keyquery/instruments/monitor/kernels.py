"""Triton kernel of the logit statistics: one pass over the keys, without the values, in O(n) memory."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from keyquery.layers.triton_support import blocks, kernel, launch, power_of_two

ROWS, COLUMNS = 128, 64  # queries and keys per tile
NONE, BOOLEAN, ADDED = range(3)  # kinds of masks


def triton_statistics(
    query: Tensor, key: Tensor, scale: float, mask: Tensor | None, causal: bool, first: Tensor | None
) -> Tensor:
    """All but the entries of `call_statistics`, on a GPU; `first` is the first key that any query sees."""
    batch, heads, n, rank = query.shape
    m = key.shape[-2]
    tiles = blocks(n, ROWS)
    out = torch.empty(batch * tiles, 6, heads, dtype=torch.float32, device=query.device)
    kind = NONE if mask is None else BOOLEAN if mask.dtype == torch.bool else ADDED
    shown = None if mask is None else mask.expand(batch, heads, n, m)
    shown = shown.view(torch.uint8) if shown is not None and kind == BOOLEAN else shown
    start = None if first is None else first.expand(batch, heads).to(torch.int32).contiguous()
    constants = (
        ("RANK", rank), ("WIDTH", max(power_of_two(rank), 16)), ("MASK", kind), ("CAUSAL", causal),
        ("FIRST", start is not None), ("ROWS", ROWS), ("COLUMNS", COLUMNS),
        ("STATIC", 0 if query.is_cuda else blocks(m, COLUMNS)), ("num_warps", 8 if rank > 64 else 4),
    )  # fmt: skip
    numbers = (
        *query.stride(), *key.stride(), *((0, 0, 0, 0) if shown is None else shown.stride()),
        heads, heads // key.shape[1], n, m, scale,
    )  # fmt: skip
    tensors = (query, key, query if shown is None else shown, out if start is None else start, out)
    launch(_compiled(), (tiles, batch * heads), tensors, numbers, constants)
    return out


_KERNEL: list[Any] = []


def _compiled() -> Any:
    if not _KERNEL:
        _KERNEL.append(kernel(_statistics))
    return _KERNEL[0]


def _statistics(
    query, key, mask, first, out,
    query_batch, query_head, query_row, query_dim, key_batch, key_head, key_row, key_dim,
    mask_batch, mask_head, mask_row, mask_column,
    heads, shared, n, m, scale,
    RANK: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """One tile of queries against all keys: online softmax that keeps Σ p·s in place of Σ p·v."""
    tile, flat = tl.program_id(0), tl.program_id(1)
    sequence, head = (flat // heads).to(tl.int64), (flat % heads).to(tl.int64)
    rows, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = query + sequence * query_batch + head * query_head
    places = places + rows[:, None].to(tl.int64) * query_row + dims[None, :] * query_dim
    queries = tl.load(places, mask=(rows[:, None] < n) & (dims[None, :] < RANK), other=0.0)
    keys_at = key + sequence * key_batch + (head // shared) * key_head
    sink_at = tl.load(first + flat) if FIRST else 0
    infinity = float("inf")
    largest, smallest = tl.full((ROWS,), -infinity, tl.float32), tl.full((ROWS,), infinity, tl.float32)
    sink, total = tl.full((ROWS,), -infinity, tl.float32), tl.zeros((ROWS,), tl.float32)
    count, weighted = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)  # Σ exp(s − largest)·(s − largest)
    last = tl.cdiv(tl.minimum((tile + 1) * ROWS, m) if CAUSAL else m, COLUMNS)
    for block in tl.range(0, STATIC if STATIC > 0 else last):  # the interpreter cannot loop up to a tensor
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        spots = keys_at + columns[None, :].to(tl.int64) * key_row + dims[:, None] * key_dim
        keys = tl.load(spots, mask=(columns[None, :] < m) & (dims[:, None] < RANK), other=0.0)
        logits = tl.dot(queries, keys, input_precision="ieee") * scale
        seen = (rows[:, None] < n) & (columns[None, :] < m)
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        if MASK != 0:
            cells = mask + sequence * mask_batch + head * mask_head
            cells = cells + rows[:, None].to(tl.int64) * mask_row + columns[None, :].to(tl.int64) * mask_column
            shown = tl.load(cells, mask=seen, other=0)
            if MASK == 1:
                seen = seen & (shown != 0)
            else:
                logits = logits + shown.to(tl.float32)
        seen = seen & ((logits > -infinity) | (logits != logits))
        above = tl.where(seen, logits, -infinity)
        smallest = tl.minimum(smallest, tl.min(tl.where(seen, logits, infinity), 1))
        top = tl.maximum(largest, tl.max(above, 1))
        base = tl.where(top == -infinity, 0.0, top)
        shift = tl.where(largest == -infinity, 0.0, largest - base)  # ≤ 0: what is already summed shrinks by e^shift
        shrink = tl.exp(shift)
        apart = tl.where(seen, logits - base[:, None], 0.0)
        weights = tl.where(seen, tl.exp(apart), 0.0)
        weighted = (weighted + shift * total) * shrink + tl.sum(weights * apart, 1)
        total = total * shrink + tl.sum(weights, 1)
        sink = tl.maximum(sink, tl.max(tl.where(columns[None, :] == sink_at, above, -infinity), 1))
        count, largest = count + tl.sum(seen.to(tl.float32), 1), top
    some, safe = count > 0, tl.where(count > 0, total, 1.0)
    broken = tl.max(((total != total) & (largest < infinity)).to(tl.int32), 0) > 0  # a NaN among the logits
    spot = out + (sequence * tl.num_programs(0) + tile) * 6 * heads + head
    tl.store(spot, tl.where(broken, float("nan"), tl.max(largest, 0)))
    tl.store(spot + heads, tl.where(broken, float("nan"), tl.min(smallest, 0)))
    tl.store(spot + 2 * heads, tl.sum(tl.where(some, tl.log(safe) - weighted / safe, 0.0), 0))
    tl.store(spot + 3 * heads, tl.sum(tl.where(some, tl.exp(sink - tl.where(some, largest, 0.0)) / safe, 0.0), 0))
    tl.store(spot + 4 * heads, tl.sum(tl.where(some, tl.log(tl.maximum(count, 1.0)), 0.0), 0))
    tl.store(spot + 5 * heads, tl.sum(some.to(tl.float32), 0))
