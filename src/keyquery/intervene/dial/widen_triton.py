"""Wide queries and keys in one pass, and their gradients in one, as Triton kernels with the signature of `widen`."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from keyquery.layers.triton_support import Constants, blocks, kernel, launch, power_of_two

SIZES = (64, 4)  # tokens and warps per program


@kernel
def _pairs(RANK: tl.constexpr, HALF: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Dimensions as two halves, the rotated ones by pair, and which of them exist: loads stay contiguous."""
    half, REST = tl.arange(0, HALF), (RANK + 1) // 2 - PAIRS
    if INTERLEAVED:
        first, second = START + 2 * half, START + 2 * half + 1
    else:
        first, second = START + half, START + PAIRS + half
    turned = half < PAIRS
    if PAIRS == 0:
        first, second = half, half + REST
    elif 2 * PAIRS != RANK:  # those that are not rotated come last
        one, other = half - PAIRS, half - PAIRS + REST
        first = tl.where(turned, first, tl.where(one < START, one, one + 2 * PAIRS))
        second = tl.where(turned, second, tl.where(other < START, other, other + 2 * PAIRS))
    return first, second, turned, turned | (half < PAIRS + REST), turned | (half + REST < RANK - PAIRS)


@kernel
def _angles(cosine, sine, row, m, turned, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Cosine and sine of every pair; 1 and 0 where nothing is rotated."""
    at, within = row[:, None].to(tl.int64) * PAIRS + tl.arange(0, HALF)[None, :], (row[:, None] < m) & turned[None, :]
    return tl.load(cosine + at, mask=within, other=1.0), tl.load(sine + at, mask=within, other=0.0)


@kernel
def _load(x, column, within):
    """A tile in float32, 0 outside."""
    return tl.load(x + column[None, :], mask=within, other=0.0).to(tl.float32)


@kernel
def _store(to, column, value, within):
    tl.store(to + column[None, :], value.to(to.dtype.element_ty), mask=within)


@kernel
def _place(batches, m, ROWS: tl.constexpr):
    """Sequence, head and tokens of a program; all sequences of a head run together, since they share its means."""
    blocks = tl.cdiv(m, ROWS)
    rest, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    return (rest % batches).to(tl.int64), (rest // batches).to(tl.int64), block * ROWS + tl.arange(0, ROWS)


@kernel
def _widen(
    query, key, at_query, at_key, cosine, sine, gains, wide_query, wide_key,
    batches, heads, m, new, query_batch, query_head, query_row, key_batch, key_head, key_row, angle_batch,
    SHARED: tl.constexpr, ACROSS: tl.constexpr, PLACED: tl.constexpr, TURNED: tl.constexpr,
    RANK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, some of its tokens: every block of q̃ and k̃, sums in float32."""
    batch, head, row = _place(batches, m, ROWS)
    sequence = batch * heads + head
    first, second, turned, has_first, has_second = _pairs(RANK, HALF, START, PAIRS, INTERLEAVED)
    inside = row[:, None] < m
    one, other = inside & has_first[None, :], inside & has_second[None, :]
    from_query = query + batch * query_batch + head * query_head + row[:, None].to(tl.int64) * query_row
    from_key = key + batch * key_batch + head * key_head + row[:, None].to(tl.int64) * key_row
    own = head if SHARED else sequence  # means at shared positions are stored once
    mean = (own * m + row[:, None]) * RANK
    mean_q, mean_q2 = _load(at_query + mean, first, one), _load(at_query + mean, second, other)
    mean_k, mean_k2 = _load(at_key + mean, first, one), _load(at_key + mean, second, other)
    q, q2 = _load(from_query, first, one) - mean_q, _load(from_query, second, other) - mean_q2
    k, k2 = _load(from_key, first, one) - mean_k, _load(from_key, second, other) - mean_k2
    symmetric, skew = tl.load(gains + head), tl.load(gains + heads + head)
    popularity, query_only = tl.load(gains + 2 * heads + head), tl.load(gains + 3 * heads + head)
    position = tl.load(gains + 4 * heads + head)
    width = RANK * (1 + ACROSS + PLACED)
    to_key = wide_key + (sequence * m + row[:, None]) * width
    to_query = wide_query + (sequence * new + row[:, None] - (m - new)) * width
    late = row[:, None] >= m - new
    both = (symmetric + skew) / 2
    _store(to_key, first, k, one)
    _store(to_key, second, k2, other)
    _store(to_query, first, both * q + popularity * mean_q, one & late)
    _store(to_query, second, both * q2 + popularity * mean_q2, other & late)
    if PLACED:
        last = RANK * (1 + ACROSS)
        _store(to_key + last, first, mean_k, one)
        _store(to_key + last, second, mean_k2, other)
        _store(to_query + last, first, query_only * q + position * mean_q, one & late)
        _store(to_query + last, second, query_only * q2 + position * mean_q2, other & late)
    if ACROSS:
        if TURNED:  # R(−2t), from the rotation by t to that by −t
            cos, sin = _angles(cosine + batch * angle_batch, sine + batch * angle_batch, row, m, turned, HALF, PAIRS)
            q, q2 = q * cos + q2 * sin, q2 * cos - q * sin
            k, k2 = k * cos + k2 * sin, k2 * cos - k * sin
        apart = (symmetric - skew) / 2
        _store(to_key + RANK, first, q, one)
        _store(to_key + RANK, second, q2, other)
        _store(to_query + RANK, first, apart * k, one & late)
        _store(to_query + RANK, second, apart * k2, other & late)


@kernel
def _narrow(
    grad_wide_query, grad_wide_key, cosine, sine, gains, grad_query, grad_key,
    batches, heads, m, new, angle_batch,
    ACROSS: tl.constexpr, PLACED: tl.constexpr, TURNED: tl.constexpr,
    RANK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Backward of `_widen`, which is affine: gradients of queries and keys from those of q̃ and k̃."""
    batch, head, row = _place(batches, m, ROWS)
    sequence = batch * heads + head
    first, second, turned, has_first, has_second = _pairs(RANK, HALF, START, PAIRS, INTERLEAVED)
    inside, late = row[:, None] < m, row[:, None] >= m - new
    one, other = inside & has_first[None, :], inside & has_second[None, :]
    width = RANK * (1 + ACROSS + PLACED)
    from_key = grad_wide_key + (sequence * m + row[:, None]) * width
    from_query = grad_wide_query + (sequence * new + row[:, None] - (m - new)) * width
    symmetric, skew = tl.load(gains + head), tl.load(gains + heads + head)
    query_only = tl.load(gains + 3 * heads + head)
    both = (symmetric + skew) / 2
    q, q2 = both * _load(from_query, first, one & late), both * _load(from_query, second, other & late)
    k, k2 = _load(from_key, first, one), _load(from_key, second, other)
    if PLACED:
        last = RANK * (1 + ACROSS)
        q += query_only * _load(from_query + last, first, one & late)
        q2 += query_only * _load(from_query + last, second, other & late)
    if ACROSS:
        swapped_q, swapped_q2 = _load(from_key + RANK, first, one), _load(from_key + RANK, second, other)
        swapped_k, swapped_k2 = (
            _load(from_query + RANK, first, one & late),
            _load(from_query + RANK, second, other & late),
        )
        if TURNED:  # R(2t), the transpose
            cos, sin = _angles(cosine + batch * angle_batch, sine + batch * angle_batch, row, m, turned, HALF, PAIRS)
            swapped_q, swapped_q2 = swapped_q * cos - swapped_q2 * sin, swapped_q2 * cos + swapped_q * sin
            swapped_k, swapped_k2 = swapped_k * cos - swapped_k2 * sin, swapped_k2 * cos + swapped_k * sin
        apart = (symmetric - skew) / 2
        q, q2 = q + swapped_q, q2 + swapped_q2
        k, k2 = k + apart * swapped_k, k2 + apart * swapped_k2
    to = (sequence * m + row[:, None]) * RANK
    _store(grad_query + to, first, q, one)
    _store(grad_query + to, second, q2, other)
    _store(grad_key + to, first, k, one)
    _store(grad_key + to, second, k2, other)


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
        tensors = (*given, *_tables(turn, of_key), ctx.gains, of_query, of_key)
        numbers = (batch, heads, m, new, _of_batch(turn))
        grid = (batch * heads * blocks(m, SIZES[0]), 1)
        launch(_narrow, grid, tensors, numbers, (("ACROSS", across), ("PLACED", placed), *_constants(rank, turn)))
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
    tensors = (queries, keys, at_query, at_key, *_tables(turn, keys), gains, wide_query, wide_key)
    numbers = (batch, heads, m, new, *queries.stride()[:3], *keys.stride()[:3], _of_batch(turn))
    shared = ("SHARED", len(at_query) == 1 and len(at_key) == 1)
    constants = (shared, ("ACROSS", across), ("PLACED", placed), *_constants(rank, turn))
    launch(_widen, (batch * heads * blocks(m, SIZES[0]), 1), tensors, numbers, constants)
    return wide_query, wide_key


def _tables(turn: Any, other: Tensor) -> tuple[Tensor, Tensor]:
    return (other, other) if turn is None else (turn.cos, turn.sin)


def _of_batch(turn: Any) -> int:
    """Distance between the angles of two sequences; 0 if they share positions."""
    return 0 if turn is None or len(turn.cos) == 1 else turn.cos.stride(0)


def _constants(rank: int, turn: Any) -> Constants:
    """Compile-time constants of the kernels."""
    pairs = 0 if turn is None else turn.cos.shape[-1]
    rotated = (0, False) if turn is None else (turn.start, turn.interleaved)
    half = power_of_two(max(pairs, -(-rank // 2)))
    return (
        *(("TURNED", turn is not None), ("RANK", rank), ("HALF", half), ("ROWS", SIZES[0])),
        *(("START", rotated[0]), ("PAIRS", pairs), ("INTERLEAVED", rotated[1]), ("num_warps", SIZES[1])),
    )
