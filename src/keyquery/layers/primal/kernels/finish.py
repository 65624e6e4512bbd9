"""The last kernel of a primal layer's backward pass: gradients of sampled tokens and of directions, and all sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from keyquery.layers.primal.kernels.prepare import BLOCK, shared, strides, tokens_at
from keyquery.layers.primal.kernels.tiles import COLUMNS, column_sums, flags, load, small, store, turns
from keyquery.layers.triton_support import Constants, blocks, kernel, launch

SHARES = 8  # programs among which the samples of a batch are divided, when gradients of directions are summed


@kernel
def _finish(
    x, grad_x, place, used, directions, grad_weights, log_lambda, energy, pull, gain, grad_directions, grad_lambda,
    mixes, biases, shifts, outs, grad_mix, grad_bias, grad_shift, grad_out,
    rows, heads, batch, tiles, n, x_b, x_n, place_b, d_side, d_h, d_row, out_b, out_n, total,
    to_tokens, to_directions, of_mix, of_bias, of_shift, mix_rows, mix_columns, bias_rows, bias_columns, shift_rows, v,
    out_rows, out_columns,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    USED: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SHARES: tl.constexpr,
    TURNS: tl.constexpr, LOSS: tl.constexpr, BATCHES: tl.constexpr,
    MIXES: tl.constexpr, BIASES: tl.constexpr, SHIFTS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """What is left of backward, each program with one task: gradients of sampled tokens, of directions, or sums."""
    program = tl.program_id(0)
    if program < to_tokens:
        _to_tokens(
            program, grad_x, place, used, directions, grad_weights,
            rows, heads, batch, n, out_b, out_n, place_b, d_side, d_h, d_row,
            p, s, P, S, BLOCK, USED, EVEN, DOT, PRECISION,
        )  # fmt: skip
    elif program < to_tokens + to_directions:
        _to_directions(
            program - to_tokens, x, place, used, grad_weights, directions, log_lambda, energy, pull, gain,
            grad_directions, grad_lambda, rows, heads, batch, tiles, n, x_b, x_n, place_b, d_side, d_h, d_row, total,
            p, s, P, S, BLOCK, USED, EVEN, DOT, PRECISION, SHARES, TURNS, LOSS, BATCHES,
        )  # fmt: skip
    else:
        program -= to_tokens + to_directions
        if program < of_mix:
            column_sums(mixes, grad_mix, program, mix_rows, mix_columns, MIXES)
        elif program < of_mix + of_bias:
            column_sums(biases, grad_bias, program - of_mix, bias_rows, bias_columns, BIASES)
        elif program < of_mix + of_bias + of_shift:
            column_sums(shifts, grad_shift, program - of_mix - of_bias, shift_rows, v, SHIFTS)
        else:
            column_sums(outs, grad_out, program - of_mix - of_bias - of_shift, out_rows, out_columns, OUTS)


@kernel
def _to_tokens(
    program, grad_x, place, used, directions, grad_weights,
    rows, heads, batch, n, x_b, x_n, place_b, d_side, d_h, d_row,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    USED: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of x, at the sampled tokens: no two programs write to the same entry."""
    h, b, tile = program % heads, (program // heads % batch).to(tl.int64), program // (heads * batch)
    feature, score, row = tl.arange(0, P), tl.arange(0, S), tile * BLOCK + tl.arange(0, BLOCK)
    own = grad_weights + (b * heads + h) * p * s
    gradient = tl.trans(small(own, feature, score, s, 1, p, s, S).to(DOT))
    table = load(directions + h * d_h, row, score, d_row, rows, s, S).to(DOT)
    more = tl.dot(table, gradient, input_precision=PRECISION)
    gradient = tl.trans(small(own + batch * heads * p * s, feature, score, s, 1, p, s, S).to(DOT))
    table = load(directions + h * d_h + d_side, row, score, d_row, rows, s, S).to(DOT)
    more = tl.dot(table, gradient, more, input_precision=PRECISION)
    places, within = tokens_at(
        grad_x + b * x_b + h * p, place + b * place_b, used + b * rows, row, feature, rows, n, x_n, p, USED, EVEN
    )
    old = tl.load(places, mask=within, other=0.0)
    tl.store(places, (old.to(tl.float32) + more).to(old.dtype), mask=within)


@kernel
def _to_directions(
    program, x, place, used, grad_weights, directions, log_lambda, energy, pull, gain, grad_directions, grad_lambda,
    rows, heads, batch, tiles, n, x_b, x_n, place_b, d_side, d_h, d_row, total,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    USED: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SHARES: tl.constexpr,
    TURNS: tl.constexpr, LOSS: tl.constexpr, BATCHES: tl.constexpr,
):  # fmt: skip
    """Sums over samples of sampled tokens and gradients; with `LOSS`, the first share adds the gradient of the loss."""
    h, tile, share = program % heads, (program // heads) % tiles, program // (heads * tiles)
    feature, score, row = tl.arange(0, P), tl.arange(0, S), tile * BLOCK + tl.arange(0, BLOCK)
    left = tl.zeros((BLOCK, S), dtype=tl.float32)
    right = tl.zeros((BLOCK, S), dtype=tl.float32)
    for turn in tl.range(0, TURNS):
        b = (turn * SHARES + share).to(tl.int64)
        shown = tl.where(b < batch, rows, 0)
        places, within = tokens_at(
            x + b * x_b + h * p, place + b * place_b, used + b * rows, row, feature, shown, n, x_n, p, USED, EVEN
        )
        tokens = tl.load(places, mask=within, other=0.0).to(DOT)
        own, all_of_it = grad_weights + (b * heads + h) * p * s, tl.where(b < batch, p, 0)
        gradient = small(own, feature, score, s, 1, all_of_it, s, S).to(DOT)
        left = tl.dot(tokens, gradient, left, input_precision=PRECISION)
        gradient = small(own + batch * heads * p * s, feature, score, s, 1, all_of_it, s, S).to(DOT)
        right = tl.dot(tokens, gradient, right, input_precision=PRECISION)
    if LOSS and share == 0:
        pulled, slope = _pulls(energy, pull, h, heads, batch, score, s, S, BATCHES)
        factor = tl.load(gain)
        first = load(directions + h * d_h, row, score, d_row, rows, s, S).to(tl.float32)
        second = load(directions + h * d_h + d_side, row, score, d_row, rows, s, S).to(tl.float32)
        left -= factor * pulled * second
        right -= factor * pulled * first
        if tile == 0:
            scale = tl.exp(tl.load(log_lambda + h * s + score, mask=score < s, other=0.0).to(tl.float32))
            tl.store(grad_lambda + h * s + score, factor * slope * scale / (2 * n), mask=score < s)
    at = grad_directions + (share * 2 * heads + h) * total * s
    store(at, left, row, score, s, total, s, S)
    store(at + heads * total * s, right, row, score, s, total, s, S)


@kernel
def _pulls(energy, pull, h, heads, batch, score, s: tl.constexpr, S: tl.constexpr, BATCHES: tl.constexpr):
    """Sums over samples of ∂loss/∂J, and of ∂loss/∂J times the energies of the scores, for one head."""
    pulled = 0.0
    slope = tl.zeros((S,), dtype=tl.float32)
    for turn in tl.range(0, BATCHES):
        b = turn * 16 + tl.arange(0, 16)
        own = tl.load(pull + b * heads + h, mask=b < batch, other=0.0)
        both = load(energy + h * s, b, score, heads * s, batch, s, S)
        both += load(energy + (batch * heads + h) * s, b, score, heads * s, batch, s, S)
        pulled += tl.sum(own, 0)
        slope += tl.sum(own[:, None] * both, 0)
    return pulled, slope


class Sums(NamedTuple):
    """Partial sums, by row, of gradients of the map of [e; r], and of the biases of q and k, that map and the output.

    Those without rows are not needed.
    """

    mix: Float[Tensor, "rows columns"]
    bias: Float[Tensor, "rows columns"]
    shift: Float[Tensor, "rows v"]
    out: Float[Tensor, "rows d"]


class Loss(NamedTuple):
    """log Λ, energies, ∂loss/∂J (batch, heads), and the number that multiplies it."""

    log_lambda: Tensor
    energy: Tensor
    pull: Tensor
    gain: Tensor


def launch_finish(
    x: Tensor,
    place: Tensor | None,
    directions: Tensor,
    used: Tensor | None,
    grad_weights: Tensor,
    total: int,
    grad_x: Tensor | None,
    loss: Loss | None = None,
    sums: Sums | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of `total` rows of the directions and of log Λ by the `loss`, and the totals of `sums`.

    The gradient of the sampled tokens is added to `grad_x`, with products in the dtype of x.
    """
    _, heads, rows, s = directions.shape
    batch, p = len(x), x.shape[-1] // heads
    shares, tiles = max(1, min(batch, SHARES)), blocks(total, BLOCK)
    grad_directions = torch.empty(shares, 2, heads, total, s, dtype=torch.float32, device=x.device)
    grad_lambda = torch.empty(heads, s, dtype=torch.float32, device=x.device)
    parts: tuple[Tensor, ...] = (grad_lambda,) * 4 if sums is None else sums
    totals = (
        [grad_lambda] * 4 if sums is None else [part.new_empty(part.shape[1:] if len(part) else 0) for part in sums]
    )
    tasks = [0] * 4 if sums is None else [blocks(part.shape[1], COLUMNS) if len(part) else 0 for part in sums]
    first = 0 if grad_x is None else batch * heads * blocks(rows, BLOCK)
    out = x if grad_x is None else grad_x
    tensors = (
        x, out, x if place is None else place, flags(used, x), directions, grad_weights,
        *((x,) * 4 if loss is None else loss), grad_directions, grad_lambda, *parts, *totals,
    )  # fmt: skip
    numbers = (
        rows, heads, batch, tiles, x.shape[1], *strides(x, place, directions), *out.stride()[:2], total,
        first, shares * tiles * heads, *tasks[:3], *(size for part in parts for size in part.shape),
    )  # fmt: skip
    facts: Constants = (("SHARES", shares), ("TURNS", blocks(batch, shares)), ("LOSS", loss is not None))
    rounds = [turns(len(part), 32) for part in parts]
    facts += (("BATCHES", turns(batch, 16)), *zip(("MIXES", "BIASES", "SHIFTS", "OUTS"), rounds, strict=True))
    grid = first + shares * tiles * heads + sum(tasks)
    launch(_finish, (grid, 1), tensors, numbers, shared(x, x.dtype, p, s, place, used) + facts)
    return grad_directions[0] if shares == 1 else grad_directions.sum(0), grad_lambda, totals
