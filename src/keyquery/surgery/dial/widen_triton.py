"""Wide queries and keys in one pass, and their gradients in one, as Triton kernels with the signature of `widen`."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from keyquery.layers.triton_support import blocks, kernel, power_of_two

BLOCK = 32  # tokens per program


@kernel
def _partner(column, START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other dimension of each one's rotated pair, the pair's number, and the sign of its sine under R(−2t)."""
    inner = column - START
    if INTERLEAVED:
        pair = inner // 2
        first = inner % 2 == 0
        other = tl.where(first, column + 1, column - 1)
    else:
        first = inner < PAIRS
        pair = tl.where(first, inner, inner - PAIRS)
        other = tl.where(first, column + PAIRS, column - PAIRS)
    turned = (inner >= 0) & (inner < 2 * PAIRS)
    return tl.where(turned, other, column), tl.where(turned, pair, 0), tl.where(first, 1.0, -1.0), turned


@kernel
def _angles(cosine, sine, row, pair, sign, turned, inside, PAIRS: tl.constexpr):
    """Cosine and signed sine of every entry; 1 and 0 where nothing is rotated."""
    at = row[:, None].to(tl.int64) * PAIRS + pair[None, :]
    within = inside & turned[None, :]
    return tl.load(cosine + at, mask=within, other=1.0), tl.load(sine + at, mask=within, other=0.0) * sign[None, :]


@kernel
def _rotated(
    x, cosine, sine, row, m, SIGN: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """R(−2t)·x, or with `SIGN` −1 R(2t)·x, of a tile whose columns are all rotated: loads stay contiguous."""
    at, inside = row[:, None].to(tl.int64) * PAIRS + tl.arange(0, PAIRS)[None, :], row[:, None] < m
    cos = tl.load(cosine + at, mask=inside, other=1.0)
    sin = tl.load(sine + at, mask=inside, other=0.0) * SIGN
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, PAIRS)), (0, 2, 1)))
    pair = tl.join(a * cos + b * sin, b * cos - a * sin)
    if not INTERLEAVED:
        pair = tl.permute(pair, (0, 2, 1))
    return tl.reshape(pair, (ROWS, 2 * PAIRS))


@kernel
def _contents(x, mean, within):
    """Both tensors in float32, 0 outside."""
    return (
        tl.load(x, mask=within, other=0.0).to(tl.float32),
        tl.load(mean, mask=within, other=0.0).to(tl.float32),
    )


@kernel
def _widen(
    query, key, at_query, at_key, cosine, sine, gains, wide_query, wide_key,
    heads, m, new, query_batch, query_head, query_row, key_batch, key_head, key_row, angle_batch,
    SHARED: tl.constexpr, ACROSS: tl.constexpr, TURNED: tl.constexpr, PLACED: tl.constexpr,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, some of its tokens: every block of q̃ and k̃, sums in float32."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (row[:, None] < m) & (column[None, :] < RANK)
    from_query = query + batch * query_batch + head * query_head + row[:, None].to(tl.int64) * query_row
    from_key = key + batch * key_batch + head * key_head + row[:, None].to(tl.int64) * key_row
    own = head if SHARED else tl.program_id(1)  # means at shared positions are stored once
    mean = (own.to(tl.int64) * m + row[:, None]) * RANK
    q, mean_q = _contents(from_query + column[None, :], at_query + mean + column[None, :], inside)
    k, mean_k = _contents(from_key + column[None, :], at_key + mean + column[None, :], inside)
    other_q, other_k = q - mean_q, k - mean_k
    # Contents rotated by R(−2t), from the rotation by t to that by −t
    if TURNED and WHOLE:
        cosines, sines = cosine + batch * angle_batch, sine + batch * angle_batch
        other_q = _rotated(other_q, cosines, sines, row, m, 1, ROWS, PAIRS, INTERLEAVED)
        other_k = _rotated(other_k, cosines, sines, row, m, 1, ROWS, PAIRS, INTERLEAVED)
    elif TURNED:
        other, pair, sign, turned = _partner(column, START, PAIRS, INTERLEAVED)
        cos, sin = _angles(
            cosine + batch * angle_batch, sine + batch * angle_batch, row, pair, sign, turned, inside, PAIRS
        )
        half, mean_half = _contents(from_query + other[None, :], at_query + mean + other[None, :], inside)
        other_q = other_q * cos + (half - mean_half) * sin
        half, mean_half = _contents(from_key + other[None, :], at_key + mean + other[None, :], inside)
        other_k = other_k * cos + (half - mean_half) * sin
    symmetric, skew = tl.load(gains + head), tl.load(gains + heads + head)
    popularity, query_only = tl.load(gains + 2 * heads + head), tl.load(gains + 3 * heads + head)
    position = tl.load(gains + 4 * heads + head)
    width = RANK * (1 + ACROSS + PLACED)
    to = wide_key + (tl.program_id(1).to(tl.int64) * m + row[:, None]) * width + column[None, :]
    kind = wide_key.dtype.element_ty
    tl.store(to, (k - mean_k).to(kind), mask=inside)
    if ACROSS:
        tl.store(to + RANK, other_q.to(kind), mask=inside)
    if PLACED:
        tl.store(to + RANK * (1 + ACROSS), mean_k.to(kind), mask=inside)
    late = inside & (row[:, None] >= m - new)
    to = wide_query + (tl.program_id(1).to(tl.int64) * new + row[:, None] - (m - new)) * width + column[None, :]
    tl.store(to, ((symmetric + skew) / 2 * (q - mean_q) + popularity * mean_q).to(kind), mask=late)
    if ACROSS:
        tl.store(to + RANK, ((symmetric - skew) / 2 * other_k).to(kind), mask=late)
    if PLACED:
        placed = query_only * (q - mean_q) + position * mean_q
        tl.store(to + RANK * (1 + ACROSS), placed.to(kind), mask=late)


@kernel
def _narrow(
    grad_wide_query, grad_wide_key, cosine, sine, gains, grad_query, grad_key, heads, m, new, angle_batch,
    ACROSS: tl.constexpr, TURNED: tl.constexpr, PLACED: tl.constexpr,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Backward of `_widen`, which is affine: gradients of queries and keys from those of q̃ and k̃."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (row[:, None] < m) & (column[None, :] < RANK)
    late = inside & (row[:, None] >= m - new)
    width = RANK * (1 + ACROSS + PLACED)
    from_key = grad_wide_key + (tl.program_id(1).to(tl.int64) * m + row[:, None]) * width
    from_query = grad_wide_query + (tl.program_id(1).to(tl.int64) * new + row[:, None] - (m - new)) * width
    symmetric, skew, query_only = (
        tl.load(gains + head),
        tl.load(gains + heads + head),
        tl.load(gains + 3 * heads + head),
    )
    of_query = (symmetric + skew) / 2 * tl.load(from_query + column[None, :], mask=late, other=0.0).to(tl.float32)
    of_key = tl.load(from_key + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if PLACED:
        placed = tl.load(from_query + RANK * (1 + ACROSS) + column[None, :], mask=late, other=0.0)
        of_query += query_only * placed.to(tl.float32)
    if ACROSS:
        swapped_query = tl.load(from_key + RANK + column[None, :], mask=inside, other=0.0).to(tl.float32)
        swapped_key = tl.load(from_query + RANK + column[None, :], mask=late, other=0.0).to(tl.float32)
        # R(2t), the transpose
        if TURNED and WHOLE:
            cosines, sines = cosine + batch * angle_batch, sine + batch * angle_batch
            swapped_query = _rotated(swapped_query, cosines, sines, row, m, -1, ROWS, PAIRS, INTERLEAVED)
            swapped_key = _rotated(swapped_key, cosines, sines, row, m, -1, ROWS, PAIRS, INTERLEAVED)
        elif TURNED:
            other, pair, sign, turned = _partner(column, START, PAIRS, INTERLEAVED)
            cos, sin = _angles(
                cosine + batch * angle_batch, sine + batch * angle_batch, row, pair, sign, turned, inside, PAIRS
            )
            half = tl.load(from_key + RANK + other[None, :], mask=inside, other=0.0).to(tl.float32)
            swapped_query = swapped_query * cos - half * sin
            half = tl.load(from_query + RANK + other[None, :], mask=late, other=0.0).to(tl.float32)
            swapped_key = swapped_key * cos - half * sin
        of_query += swapped_query
        of_key += (symmetric - skew) / 2 * swapped_key
    to = (tl.program_id(1).to(tl.int64) * m + row[:, None]) * RANK + column[None, :]
    tl.store(grad_query + to, of_query.to(grad_query.dtype.element_ty), mask=inside)
    tl.store(grad_key + to, of_key.to(grad_key.dtype.element_ty), mask=inside)


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
    gains = gains.to(keys.device, torch.float32)
    options = new, across, placed, turn if across else None
    if torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad):
        wide: tuple[Tensor, Tensor] = _Widen.apply(queries, keys, at_query, at_key, gains, *options)
        return wide
    return _run(queries, keys, at_query, at_key, gains, *options)


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.gains, ctx.options, ctx.like = inputs[4], inputs[5:], inputs[1]
        return _run(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_query: Tensor | None, grad_key: Tensor | None) -> tuple[Tensor | None, ...]:
        new, across, placed, turn = ctx.options
        batch, heads, m, rank = ctx.like.shape
        width = rank * (1 + across + placed)
        shapes = (batch, heads, new, width), (batch, heads, m, width)
        given = [
            ctx.like.new_zeros(shape) if grad is None else grad.contiguous()
            for grad, shape in zip((grad_query, grad_key), shapes, strict=True)
        ]
        of_query, of_key = (ctx.like.new_empty(batch, heads, m, rank) for _ in range(2))
        _narrow[(blocks(m, BLOCK), batch * heads)](
            *given, *_tables(turn, of_key), ctx.gains, of_query, of_key, heads, m, new, _of_batch(turn),
            ACROSS=across, PLACED=placed, **_sizes(rank, turn),
        )  # fmt: skip
        return of_query, of_key, *(None,) * 7


def _run(
    queries: Tensor,
    keys: Tensor,
    at_query: Tensor,
    at_key: Tensor,
    gains: Tensor,
    new: int,
    across: bool,
    placed: bool,
    turn: Any,
) -> tuple[Tensor, Tensor]:
    batch, heads, m, rank = keys.shape
    width = rank * (1 + across + placed)
    queries, keys = (t if t.stride(-1) == 1 else t.contiguous() for t in (queries, keys))
    at_query, at_key = at_query.contiguous(), at_key.contiguous()
    wide_query, wide_key = queries.new_empty(batch, heads, new, width), keys.new_empty(batch, heads, m, width)
    _widen[(blocks(m, BLOCK), batch * heads)](
        queries, keys, at_query, at_key, *_tables(turn, keys), gains, wide_query, wide_key,
        heads, m, new, *queries.stride()[:3], *keys.stride()[:3], _of_batch(turn),
        SHARED=len(at_query) == 1 and len(at_key) == 1, ACROSS=across, PLACED=placed, **_sizes(rank, turn),
    )  # fmt: skip
    return wide_query, wide_key


def _tables(turn: Any, other: Tensor) -> tuple[Tensor, Tensor]:
    return (other, other) if turn is None else (turn.cos, turn.sin)


def _of_batch(turn: Any) -> int:
    """Distance between the angles of two sequences; 0 if they share positions."""
    return 0 if turn is None or len(turn.cos) == 1 else turn.cos.stride(0)


def _sizes(rank: int, turn: Any) -> dict[str, Any]:
    sizes = {"RANK": rank, "PADDED": power_of_two(rank), "ROWS": BLOCK, "TURNED": turn is not None}
    if turn is None:
        return {**sizes, "START": 0, "PAIRS": 1, "INTERLEAVED": False, "WHOLE": False}
    pairs = turn.cos.shape[-1]
    whole = 2 * pairs == rank == power_of_two(rank)
    return {**sizes, "START": turn.start, "PAIRS": pairs, "INTERLEAVED": turn.interleaved, "WHOLE": whole}
