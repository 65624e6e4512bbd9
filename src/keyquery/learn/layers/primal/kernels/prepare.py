"""The first kernel of a primal layer: W_e|X = f(X)ᵀWe and W_r|X = f(X)ᵀWr of the sampled tokens, read in place, and
tensors in another dtype."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from keyquery.layers.triton_support import Constants, blocks, kernel, launch
from keyquery.learn.layers.primal.kernels.tiles import flags, load, products, store, widths

BLOCK = 64  # sampled tokens at a time
CHUNK = 4096  # numbers to cast per program


@kernel
def tokens_at(x, place, used, row, feature, rows, n, x_n, p: tl.constexpr, USED: tl.constexpr, EVEN: tl.constexpr):
    """Pointers to the sampled tokens of a head (BLOCK, P), and which of them are used."""
    here = row < rows
    if EVEN:  # as `sample.evenly` without padding
        at = row.to(tl.int64) * (n - 1) // tl.maximum(rows - 1, 1) * x_n
    else:
        at = tl.load(place + row, mask=here, other=0).to(tl.int64) * x_n
    if USED:
        here = here & (tl.load(used + row, mask=here, other=0) != 0)
    places = x + at[:, None] + feature[None, :]
    within = here[:, None] & (feature[None, :] < p)
    return places, within


@kernel
def _prepare(
    x, place, used, directions, weights, x2, old, new, old2, new2, old3, new3, old4, new4,
    rows, heads, batch, n, x_b, x_n, place_b, d_side, d_h, d_row, w_side, w_b, w_h, w_p,
    size, size1, size2, size3, size4, stride, second, third, fourth, fifth,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, USED: tl.constexpr, EVEN: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program has one task: a head of a sample, or numbers of one of five tensors.

    Heads, which wait for memory, are every `stride`-th program, so that casts run beside them.
    """
    head, heads_before = tl.program_id(0) // stride, tl.minimum(tl.cdiv(tl.program_id(0), stride), heads * batch)
    program = tl.program_id(0) - heads_before
    if (tl.program_id(0) % stride == 0) & (head < heads * batch):
        _combine(
            head, x, place, used, directions, weights,
            rows, heads, batch, n, x_b, x_n, place_b, d_side, d_h, d_row, w_side, w_b, w_h, w_p,
            p, s, P, S, BLOCK, TILES, USED, EVEN, DOT, PRECISION,
        )  # fmt: skip
    elif program < second:
        _cast(x, x2, program, size, CHUNK)
    elif program < third:
        _cast(old, new, program - second, size1, CHUNK)
    elif program < fourth:
        _cast(old2, new2, program - third, size2, CHUNK)
    elif program < fifth:
        _cast(old3, new3, program - fourth, size3, CHUNK)
    else:
        _cast(old4, new4, program - fifth, size4, CHUNK)


@kernel
def _cast(old, new, number, size, CHUNK: tl.constexpr):
    at = number.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(new + at, tl.load(old + at, mask=at < size, other=0.0).to(new.dtype.element_ty), mask=at < size)


@kernel
def _combine(
    program, x, place, used, directions, weights,
    rows, heads, batch, n, x_b, x_n, place_b, d_side, d_h, d_row, w_side, w_b, w_h, w_p,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    USED: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """f(X)ᵀWe and f(X)ᵀWr of one head of one sample."""
    h, b = program % heads, (program // heads).to(tl.int64)
    feature, score = tl.arange(0, P), tl.arange(0, S)
    left = tl.zeros((P, S), dtype=tl.float32)
    right = tl.zeros((P, S), dtype=tl.float32)
    for tile in tl.range(0, TILES, num_stages=1):  # little shared memory, so that many programs fit
        row = tile * BLOCK + tl.arange(0, BLOCK)
        places, within = tokens_at(
            x + b * x_b + h * p, place + b * place_b, used + b * rows, row, feature, rows, n, x_n, p, USED, EVEN
        )
        tokens = tl.trans(tl.load(places, mask=within, other=0.0).to(DOT))
        own = load(directions + h * d_h, row, score, d_row, rows, s, S).to(DOT)
        left = tl.dot(tokens, own, left, input_precision=PRECISION)
        own = load(directions + h * d_h + d_side, row, score, d_row, rows, s, S).to(DOT)
        right = tl.dot(tokens, own, right, input_precision=PRECISION)
    place_out = weights + b * w_b + h * w_h
    store(place_out, left, feature, score, w_p, p, s, S)
    store(place_out + w_side, right, feature, score, w_p, p, s, S)


def launch_prepare(
    x: Tensor,
    place: Tensor | None,
    directions: Tensor,
    used: Tensor | None,
    dtype: torch.dtype,
    maps: tuple[Tensor | None, ...] = (None,) * 4,
) -> tuple[Tensor, list[Tensor]]:
    """Projection weights in `dtype` (2, batch, heads, p, s), and x and four more tensors in it.

    Tokens are evenly spaced if `place` is None. In place of tensors that are None or have the dtype already there are
    empty ones.
    """
    x = x if x.dtype == dtype else x.contiguous()
    others = tuple([None if t is None or t.dtype == dtype else t.shape for t in (x, *maps)])
    spacing = strides(x, place, directions)
    plan = _plan(x.shape, directions.shape, others, spacing, used is not None, place is None, *products(x, dtype))
    weights = torch.empty(plan.weights, dtype=dtype, device=x.device)[..., : directions.shape[3]]
    new = [torch.empty(shape or 0, dtype=dtype, device=x.device) for shape in others]
    if not plan.grid[0]:
        return weights, new
    old = [x if t is None or shape is None else t.contiguous() for t, shape in zip(maps, others[1:], strict=True)]
    tensors = (
        *(x, x if place is None else place, flags(used, x), directions, weights, new[0]),
        *(t for pair in zip(old, new[1:], strict=True) for t in pair),
    )
    launch(_prepare, plan.grid, tensors, plan.numbers, plan.constants)
    return weights, new


class Plan(NamedTuple):
    """Grid, numbers and constants of a launch, and the shape of the projection weights."""

    grid: tuple[int, int]
    numbers: tuple[int, ...]
    constants: Constants
    weights: tuple[int, ...]


@lru_cache(maxsize=256)
def _plan(
    shape: tuple[int, ...],
    table: tuple[int, ...],
    others: tuple[tuple[int, ...] | None, ...],
    spacing: tuple[int, ...],
    used: bool,
    even: bool,
    *dots: Any,
) -> Plan:
    """For x and directions of these shapes; `others` are the shapes of tensors to cast, x first."""
    _, heads, rows, s = table
    batch, n, d = shape
    p = d // heads
    # Rows are padded to a multiple of 8, for aligned loads.
    weights = 2, batch, heads, p, -(-s // 8) * 8
    sizes = [0 if other is None else math.prod(other) for other in others]
    ends = [0, *accumulate(blocks(size, CHUNK) for size in sizes)]
    numbers = (
        *(rows, heads, batch, n, *spacing),
        *(math.prod(weights[1:]), math.prod(weights[2:]), math.prod(weights[3:]), weights[4]),
        *(*sizes, max(ends[5] // (2 * batch * heads), 1) if batch else 1, *ends[1:5]),
    )
    constants = (*constants_of(p, s, used, even, *dots), ("TILES", blocks(rows, BLOCK)), ("CHUNK", CHUNK))
    return Plan((batch * heads + ends[5] if batch else 0, 1), numbers, constants, weights)


def constants_of(p: int, s: int, used: bool, even: bool, *dots: Any) -> Constants:
    """Compile-time constants of kernels that read sampled tokens; `dots` are those of `products`."""
    return tuple({**widths(p=p, s=s), **dict(dots), "BLOCK": BLOCK, "USED": used, "EVEN": even}.items())


def strides(x: Tensor, place: Tensor | None, directions: Tensor) -> tuple[int, ...]:
    """Those of x, of the indices and of the directions, for kernels that read sampled tokens."""
    assert x.stride(-1) == directions.stride(-1) == 1, "the last dimension must be contiguous"
    own = 0 if place is None or place.ndim == 1 else place.stride(0)
    return *x.stride()[:2], own, *directions.stride()[:3]
