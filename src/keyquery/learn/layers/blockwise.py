"""Attention in float32 on a GPU, for training: matrix products over blocks of scores, and their softmax with dropout.

There are no fast fused kernels for float32. Scores are written for one block of queries at a time and computed again in
backward with the same random numbers, so memory is linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from keyquery.layers.triton_support import Constants, blocks, kernel, launch

CELLS = 2**27  # scores per block: smaller products are slower
SIZE = 256  # columns that share a random number of 128 bits with seven others
LEVELS = 2**16  # of a random number
WARPS = 4


@kernel
def _words(seed, row, start, m, SIZE: tl.constexpr):
    """Random numbers of 128 bits, one for every eight columns of a row: 16 bits each."""
    number = row * tl.cdiv(m, 8 * SIZE) * SIZE + start // 8 + tl.arange(0, SIZE)
    return tl.randint4x(tl.load(seed), number, 7)


@kernel
def _weight(scores, word, column, m, top, share, least, factor, HALF: tl.constexpr, DROPS: tl.constexpr):
    """Attention weights of some columns, and what dropout multiplies them by."""
    within = column < m
    weight = tl.exp(tl.load(scores + column, mask=within, other=float("-inf")) - top) * share
    if DROPS:
        drawn = (word >> (16 * HALF)) & 0xFFFF
        kept = tl.where(drawn.to(tl.int32) >= least, factor, 0.0)
    else:
        kept = tl.full(weight.shape, 1.0, tl.float32)
    return weight, kept, within


@kernel
def _store_weight(scores, word, column, m, top, share, least, factor, HALF: tl.constexpr, DROPS: tl.constexpr):
    weight, kept, within = _weight(scores, word, column, m, top, share, least, factor, HALF, DROPS)
    tl.store(scores + column, weight * kept, mask=within)


@kernel
def _store_both(
    scores, worth, word, column, m, top, share, mean, least, factor, HALF: tl.constexpr, DROPS: tl.constexpr
):  # fmt: skip
    weight, kept, within = _weight(scores, word, column, m, top, share, least, factor, HALF, DROPS)
    gradient = tl.load(worth + column, mask=within, other=0.0)
    tl.store(scores + column, weight * kept, mask=within)
    tl.store(worth + column, weight * (gradient * kept - mean), mask=within)


@kernel
def _soften(
    scores, tops, seed, m, least, factor, SIZE: tl.constexpr, DROPS: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """One row of scores replaced by attention weights after dropout; its highest score and 1/Σ exp are stored."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * m
    wide = tl.arange(0, 8 * SIZE)
    most, sums = tl.full((8 * SIZE,), -1e38, tl.float32), tl.zeros((8 * SIZE,), tl.float32)
    for turn in tl.range(0, TURNS):
        at = turn * 8 * SIZE + wide
        x = tl.load(scores + at, mask=at < m, other=float("-inf"))
        new = tl.maximum(most, x)
        sums = sums * tl.exp(most - new) + tl.exp(x - new)
        most = new
    top = tl.max(most, 0)
    share = 1 / tl.sum(sums * tl.exp(most - top), 0)
    tl.store(tops + 2 * row, top)
    tl.store(tops + 2 * row + 1, share)
    column = tl.arange(0, SIZE)
    for turn in tl.range(0, TURNS):
        a, b, c, d = _words(seed, row, turn * 8 * SIZE, m, SIZE)
        at = turn * 8 * SIZE + column
        _store_weight(scores, a, at, m, top, share, least, factor, 0, DROPS)
        _store_weight(scores, a, at + SIZE, m, top, share, least, factor, 1, DROPS)
        _store_weight(scores, b, at + 2 * SIZE, m, top, share, least, factor, 0, DROPS)
        _store_weight(scores, b, at + 3 * SIZE, m, top, share, least, factor, 1, DROPS)
        _store_weight(scores, c, at + 4 * SIZE, m, top, share, least, factor, 0, DROPS)
        _store_weight(scores, c, at + 5 * SIZE, m, top, share, least, factor, 1, DROPS)
        _store_weight(scores, d, at + 6 * SIZE, m, top, share, least, factor, 0, DROPS)
        _store_weight(scores, d, at + 7 * SIZE, m, top, share, least, factor, 1, DROPS)


@kernel
def _soften_backward(
    scores, worth, tops, means, seed, m, least, factor, SIZE: tl.constexpr, DROPS: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Some columns of a row: scores replaced by weights after dropout, gradients of these by gradients of scores."""
    row, start = tl.program_id(0), tl.program_id(1) * 8 * SIZE
    scores += row.to(tl.int64) * m
    worth += row.to(tl.int64) * m
    top, share, mean = tl.load(tops + 2 * row), tl.load(tops + 2 * row + 1), tl.load(means + row)
    a, b, c, d = _words(seed, row, start, m, SIZE)
    at = start + tl.arange(0, SIZE)
    _store_both(scores, worth, a, at, m, top, share, mean, least, factor, 0, DROPS)
    _store_both(scores, worth, a, at + SIZE, m, top, share, mean, least, factor, 1, DROPS)
    _store_both(scores, worth, b, at + 2 * SIZE, m, top, share, mean, least, factor, 0, DROPS)
    _store_both(scores, worth, b, at + 3 * SIZE, m, top, share, mean, least, factor, 1, DROPS)
    _store_both(scores, worth, c, at + 4 * SIZE, m, top, share, mean, least, factor, 0, DROPS)
    _store_both(scores, worth, c, at + 5 * SIZE, m, top, share, mean, least, factor, 1, DROPS)
    _store_both(scores, worth, d, at + 6 * SIZE, m, top, share, mean, least, factor, 0, DROPS)
    _store_both(scores, worth, d, at + 7 * SIZE, m, top, share, mean, least, factor, 1, DROPS)


def attend(
    query: Float[Tensor, "*batch n r"],
    key: Float[Tensor, "*batch m r"],
    value: Float[Tensor, "*batch m v"],
    scale: float,
    share: float,
) -> Float[Tensor, "*batch n v"]:
    """dropout(softmax(scale·q kᵀ)) v with gradients, as `cpu_dropout.drop_and_attend`; there must be keys."""
    flat = [part.reshape(-1, *part.shape[-2:]) for part in (query, key, value)]
    out: Tensor = _Blockwise.apply(*flat, scale, share)
    return out.view(*query.shape[:-1], value.shape[-1])


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, share: float) -> Tensor:
        heads, n, m = len(query), query.shape[1], key.shape[1]
        out = query.new_empty(heads, n, value.shape[-1])
        tops = query.new_empty(heads, n, 2)
        places = list(_places(heads, n, m))
        seeds = torch.randint(2**62, (len(places),), device=query.device)
        numbers, constants = _numbers(m, share)
        for number, (head, at) in enumerate(places):
            scores = _product(query[head, at], key[head].mT, scale)
            tensors = scores, tops[head, at], seeds[number:]
            launch(_soften, (scores[..., 0].numel(), 1), tensors, numbers, constants)
            torch.bmm(scores, value[head], out=out[head, at])
        ctx.save_for_backward(query, key, value, out, tops, seeds)
        ctx.scale, ctx.share, ctx.places = scale, share, places
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, tops, seeds = ctx.saved_tensors
        of_query, of_key, of_value = (torch.empty_like(t) for t in (query, key, value))
        means = (grad * out).sum(-1)  # the softmax term of backward
        m = key.shape[1]
        numbers, constants = _numbers(m, ctx.share)
        for number, (head, at) in enumerate(ctx.places):
            scores = _product(query[head, at], key[head].mT, ctx.scale)
            worth = torch.bmm(grad[head, at], value[head].mT)
            tensors = scores, worth, tops[head, at], means[head, at], seeds[number:]
            launch(_soften_backward, (scores[..., 0].numel(), blocks(m, 8 * SIZE)), tensors, numbers, constants)
            again = int(at.start > 0)  # blocks of one head are added up
            _add(of_value[head], scores.mT, grad[head, at], 1.0, again)
            _add(of_query[head, at], worth, key[head], ctx.scale, 0)
            _add(of_key[head], worth.mT, query[head, at], ctx.scale, again)
        return of_query, of_key, of_value, None, None


def _places(heads: int, n: int, m: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of at most `CELLS` scores: several heads, or some queries of one."""
    if n * m <= CELLS:
        several = CELLS // (n * m)
        yield from ((slice(first, first + several), slice(0, n)) for first in range(0, heads, several))
        return
    size = max(CELLS // m, 1)
    for head in range(heads):
        yield from ((slice(head, head + 1), slice(first, first + size)) for first in range(0, n, size))


def _numbers(m: int, share: float) -> tuple[tuple[float, ...], Constants]:
    """Numbers and constants of both kernels."""
    constants = (("SIZE", SIZE), ("DROPS", share > 0), ("TURNS", blocks(m, 8 * SIZE)), ("num_warps", WARPS))
    return (m, round(share * LEVELS), 1 / (1 - share)), constants


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale·ab."""
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    _add(out, a, b, scale, 0)
    return out


def _add(to: Tensor, a: Tensor, b: Tensor, scale: float, again: int) -> None:
    """scale·ab in place, added to what is there if `again`."""
    torch.baddbmm(to, a, b, beta=again, alpha=scale, out=to)
