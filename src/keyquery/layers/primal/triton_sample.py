"""Projection weights W_e|X = f(X)ᵀWe and W_r|X = f(X)ᵀWr as Triton kernels: sampled tokens are read in place.

Signatures are those of `sample.combine` and `sample.uncombine`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keyquery.layers.primal.triton_tiles import flags, load, products, small, store, widths
from keyquery.layers.triton_support import kernel

BLOCK = 64  # sampled tokens at a time
SHARES = 8  # programs among which the samples of a batch are divided, when gradients of directions are summed


@kernel
def _tokens(x, place, used, row, feature, rows, x_n, p: tl.constexpr, P: tl.constexpr, USED: tl.constexpr):
    """Pointers to the sampled tokens of a head (BLOCK, P), and which of them are used."""
    here = row < rows
    at = tl.load(place + row, mask=here, other=0).to(tl.int64) * x_n
    if USED:
        here = here & (tl.load(used + row, mask=here, other=0) != 0)
    places = x + at[:, None] + feature[None, :]
    within = here[:, None] & (feature[None, :] < p)
    return places, within


@kernel
def _combine(
    x, place, used, directions, weights,
    rows, heads, batch, x_b, x_n, place_b, d_side, d_h, d_row, w_side, w_b, w_h, w_p,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    USED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(0) % heads, (tl.program_id(0) // heads).to(tl.int64)
    feature, score = tl.arange(0, P), tl.arange(0, S)
    left = tl.zeros((P, S), dtype=tl.float32)
    right = tl.zeros((P, S), dtype=tl.float32)
    for tile in tl.range(0, TILES):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        places, within = _tokens(
            x + b * x_b + h * p, place + b * place_b, used + b * rows, row, feature, rows, x_n, p, P, USED
        )
        tokens = tl.trans(tl.load(places, mask=within, other=0.0).to(DOT))
        own = load(directions + h * d_h, row, score, d_row, rows, s, S).to(DOT)
        left = tl.dot(tokens, own, left, input_precision=PRECISION)
        own = load(directions + h * d_h + d_side, row, score, d_row, rows, s, S).to(DOT)
        right = tl.dot(tokens, own, right, input_precision=PRECISION)
    place_out = weights + b * w_b + h * w_h
    store(place_out, left, feature, score, w_p, p, s, S)
    store(place_out + w_side, right, feature, score, w_p, p, s, S)


@kernel
def _to_tokens(
    grad_x, place, used, directions, grad_weights,
    rows, heads, batch, x_b, x_n, place_b, d_side, d_h, d_row,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    USED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of x, at the sampled tokens: no two programs write to the same entry."""
    h, b = tl.program_id(0) % heads, (tl.program_id(0) // heads).to(tl.int64)
    feature, score = tl.arange(0, P), tl.arange(0, S)
    own = grad_weights + (b * heads + h) * p * s
    left = tl.trans(small(own, feature, score, s, 1, p, s, S).to(DOT))
    right = tl.trans(small(own + batch * heads * p * s, feature, score, s, 1, p, s, S).to(DOT))
    for tile in tl.range(0, TILES):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        table = load(directions + h * d_h, row, score, d_row, rows, s, S).to(DOT)
        more = tl.dot(table, left, input_precision=PRECISION)
        table = load(directions + h * d_h + d_side, row, score, d_row, rows, s, S).to(DOT)
        more = tl.dot(table, right, more, input_precision=PRECISION)
        places, within = _tokens(
            grad_x + b * x_b + h * p, place + b * place_b, used + b * rows, row, feature, rows, x_n, p, P, USED
        )
        old = tl.load(places, mask=within, other=0.0)
        tl.store(places, (old.to(tl.float32) + more).to(old.dtype), mask=within)


@kernel
def _to_directions(
    x, place, used, grad_weights, grad_directions,
    rows, heads, batch, tiles, x_b, x_n, place_b,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    USED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SHARES: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h, tile, share = program % heads, (program // heads) % tiles, program // (heads * tiles)
    feature, score, row = tl.arange(0, P), tl.arange(0, S), tile * BLOCK + tl.arange(0, BLOCK)
    left = tl.zeros((BLOCK, S), dtype=tl.float32)
    right = tl.zeros((BLOCK, S), dtype=tl.float32)
    for turn in tl.range(0, TURNS):
        b = (turn * SHARES + share).to(tl.int64)
        shown = tl.where(b < batch, rows, 0)
        places, within = _tokens(
            x + b * x_b + h * p, place + b * place_b, used + b * rows, row, feature, shown, x_n, p, P, USED
        )
        tokens = tl.load(places, mask=within, other=0.0).to(DOT)
        own, all_of_it = grad_weights + (b * heads + h) * p * s, tl.where(b < batch, p, 0)
        gradient = small(own, feature, score, s, 1, all_of_it, s, S).to(DOT)
        left = tl.dot(tokens, gradient, left, input_precision=PRECISION)
        gradient = small(own + batch * heads * p * s, feature, score, s, 1, all_of_it, s, S).to(DOT)
        right = tl.dot(tokens, gradient, right, input_precision=PRECISION)
    at = grad_directions + (share * 2 * heads + h) * rows * s
    store(at, left, row, score, s, rows, s, S)
    store(at + heads * rows * s, right, row, score, s, rows, s, S)


def combine(
    x: Float[Tensor, "batch n d"],
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
) -> Float[Tensor, "2 batch heads p s"]:
    """As `sample.combine`."""
    return (_COMBINE if torch.compiler.is_compiling() else _run_combine)(x, place, directions, used)


def uncombine(
    x: Float[Tensor, "batch n d"],
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
    grad_weights: Float[Tensor, "2 batch heads p s"],
    grad_x: Float[Tensor, "batch n d"],
) -> Float[Tensor, "2 heads rows s"]:
    """As `sample.uncombine`."""
    run = _UNCOMBINE if torch.compiler.is_compiling() else _run_uncombine
    return run(x, place, directions, used, grad_weights, grad_x)


def _run_combine(x: Tensor, place: Tensor, directions: Tensor, used: Tensor | None) -> Tensor:
    _, heads, rows, s = directions.shape
    batch, p = len(x), x.shape[-1] // heads
    # Rows are padded to a multiple of 8, for aligned loads.
    weights = torch.empty(2, batch, heads, p, -(-s // 8) * 8, dtype=x.dtype, device=x.device)[..., :s]
    if batch:
        _combine[(batch * heads,)](
            x, place, flags(used, x), directions, weights,
            rows, heads, batch, *_strides(x, place, directions), *weights.stride()[:4], TILES=triton.cdiv(rows, BLOCK),
            **_shared(x, p, s, used),
        )  # fmt: skip
    return weights


def _run_uncombine(
    x: Tensor, place: Tensor, directions: Tensor, used: Tensor | None, grad_weights: Tensor, grad_x: Tensor
) -> Tensor:
    _, heads, rows, s = directions.shape
    batch, p = len(x), x.shape[-1] // heads
    shares, tiles = max(1, min(batch, SHARES)), triton.cdiv(rows, BLOCK)
    grad_directions = torch.empty(shares, 2, heads, rows, s, dtype=torch.float32, device=x.device)
    if batch == 0:
        return grad_directions.zero_()[0]
    grad_weights, shared = grad_weights.contiguous(), _shared(x, p, s, used)
    _to_tokens[(batch * heads,)](
        grad_x, place, flags(used, x), directions, grad_weights,
        rows, heads, batch, *_strides(grad_x, place, directions), TILES=tiles, **shared,
    )  # fmt: skip
    _to_directions[(shares * tiles * heads,)](
        x, place, flags(used, x), grad_weights, grad_directions,
        rows, heads, batch, tiles, *_strides(x, place, directions)[:3],
        SHARES=shares, TURNS=triton.cdiv(batch, shares), **shared,
    )  # fmt: skip
    return grad_directions[0] if shares == 1 else grad_directions.sum(0)


def _shared(x: Tensor, p: int, s: int, used: Tensor | None) -> dict[str, Any]:
    return {**widths(p=p, s=s), **products(x), "BLOCK": BLOCK, "USED": used is not None}


def _strides(x: Tensor, place: Tensor, directions: Tensor) -> tuple[int, ...]:
    assert x.stride(-1) == directions.stride(-1) == 1, "the last dimension must be contiguous"
    return *x.stride()[:2], place.stride(0) if place.ndim == 2 else 0, *directions.stride()[:3]


_COMBINE: Any = torch.library.custom_op(
    "keyquery::primal_combine",
    _run_combine,
    mutates_args=(),
    schema="(Tensor x, Tensor place, Tensor directions, Tensor? used) -> Tensor",
)
_UNCOMBINE: Any = torch.library.custom_op(
    "keyquery::primal_uncombine",
    _run_uncombine,
    mutates_args=("grad_x",),
    schema="(Tensor x, Tensor place, Tensor directions, Tensor? used, Tensor grad_weights, Tensor(a!) grad_x)"
    " -> Tensor",
)


@_COMBINE.register_fake
def _shape_combine(x: Tensor, place: Tensor, directions: Tensor, used: Tensor | None) -> Tensor:
    _, heads, _, s = directions.shape
    return x.new_empty(2, len(x), heads, x.shape[-1] // heads, -(-s // 8) * 8)[..., :s]


@_UNCOMBINE.register_fake
def _shape_uncombine(
    x: Tensor, place: Tensor, directions: Tensor, used: Tensor | None, grad_weights: Tensor, grad_x: Tensor
) -> Tensor:
    return directions.new_empty(directions.shape, dtype=torch.float32)
