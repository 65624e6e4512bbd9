"""The last kernel of a primal layer's backward pass: gradients of sampled tokens and of directions, and all sums."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from keyquery.layers.triton_support import Constants, blocks, kernel, launch
from keyquery.learn.layers.primal.kernels.prepare import BLOCK, constants_of, strides, tokens_at
from keyquery.learn.layers.primal.kernels.tiles import COLUMNS, column_sums, flags, load, products, small, store, turns

SHARES = 8  # programs among which the samples of a batch are divided, when gradients of directions are summed


@kernel
def _finish(
    x, grad_x, place, used, directions, grad_weights, log_lambda, energy, pull, gain, grad_directions, grad_lambda,
    mixes, biases, shifts, outs, grad_mix, grad_bias, grad_shift, grad_out,
    rows, heads, batch, tiles, n, x_b, x_n, place_b, d_side, d_h, d_row, out_b, out_n, total,
    of_mix, to_bias, to_shift, to_out, to_directions, mix_rows, mix_columns, bias_rows, bias_columns, shift_rows, v,
    out_rows, out_columns,
    p: tl.constexpr, s: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    USED: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SHARES: tl.constexpr,
    TURNS: tl.constexpr, LOSS: tl.constexpr, BATCHES: tl.constexpr,
    MIXES: tl.constexpr, BIASES: tl.constexpr, SHIFTS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """What is left of backward, each program with one task: sums, gradients of directions, or of sampled tokens.

    Long tasks begin first.
    """
    program = tl.program_id(0)
    if program < of_mix:
        column_sums(mixes, grad_mix, program, mix_rows, mix_columns, MIXES)
    elif program < to_bias:
        column_sums(biases, grad_bias, program - of_mix, bias_rows, bias_columns, BIASES)
    elif program < to_shift:
        column_sums(shifts, grad_shift, program - to_bias, shift_rows, v, SHIFTS)
    elif program < to_out:
        column_sums(outs, grad_out, program - to_shift, out_rows, out_columns, OUTS)
    elif program < to_directions:
        _to_directions(
            program - to_out, x, place, used, grad_weights, directions, log_lambda, energy, pull, gain,
            grad_directions, grad_lambda, rows, heads, batch, tiles, n, x_b, x_n, place_b, d_side, d_h, d_row, total,
            p, s, P, S, BLOCK, USED, EVEN, DOT, PRECISION, SHARES, TURNS, LOSS, BATCHES,
        )  # fmt: skip
    else:
        _to_tokens(
            program - to_directions, grad_x, place, used, directions, grad_weights,
            rows, heads, batch, n, out_b, out_n, place_b, d_side, d_h, d_row,
            p, s, P, S, BLOCK, USED, EVEN, DOT, PRECISION,
        )  # fmt: skip


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
    for turn in tl.range(0, TURNS, num_stages=2):  # little shared memory, so that many programs fit
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
    _, heads, _, s = directions.shape
    parts = () if sums is None else sums
    plan = _plan(
        x.shape, directions.shape, strides(x, place, directions), None if grad_x is None else grad_x.stride(), total,
        tuple([part.shape for part in parts]), used is not None, place is None, loss is not None,
        *products(x, x.dtype),
    )  # fmt: skip
    grad_directions = torch.empty(plan.shares, 2, heads, total, s, dtype=torch.float32, device=x.device)
    grad_lambda = torch.empty(heads, s, dtype=torch.float32, device=x.device)
    totals = [torch.empty(size, dtype=torch.float32, device=x.device) for size in plan.sizes]
    tensors = (
        *(x, x if grad_x is None else grad_x, x if place is None else place, flags(used, x), directions, grad_weights),
        *((x,) * 4 if loss is None else loss),
        *(grad_directions, grad_lambda, *(parts or (grad_lambda,) * 4), *(totals or (grad_lambda,) * 4)),
    )
    launch(_finish, plan.grid, tensors, plan.numbers, plan.constants)
    return grad_directions[0] if plan.shares == 1 else grad_directions.sum(0), grad_lambda, totals


class Plan(NamedTuple):
    """Grid, numbers and constants of a launch, programs that share samples, and columns of the totals."""

    grid: tuple[int, int]
    numbers: tuple[int, ...]
    constants: Constants
    shares: int
    sizes: tuple[int, ...]


@lru_cache(maxsize=256)
def _plan(
    shape: tuple[int, ...],
    table: tuple[int, ...],
    spacing: tuple[int, ...],
    out: tuple[int, ...] | None,
    total: int,
    parts: tuple[tuple[int, ...], ...],
    used: bool,
    even: bool,
    loss: bool,
    *dots: Any,
) -> Plan:
    """For x, directions and partial sums of these shapes; `out` are strides of the gradient of x, if it is wanted."""
    _, heads, rows, s = table
    batch, n, d = shape
    shares, tiles = max(1, min(batch, SHARES)), blocks(total, BLOCK)
    tasks = [blocks(columns, COLUMNS) if count else 0 for count, columns in parts] or [0] * 4
    first = 0 if out is None else batch * heads * blocks(rows, BLOCK)
    numbers = (
        *(rows, heads, batch, tiles, n, *spacing, *(spacing[:2] if out is None else out[:2]), total),
        *accumulate((*tasks, shares * tiles * heads)),
        *((size for part in parts for size in part) if parts else (0,) * 8),
    )
    rounds = [turns(count, 32) for count, _ in parts] or [1] * 4
    constants = (
        *constants_of(d // heads, s, used, even, *dots),
        *(("SHARES", shares), ("TURNS", blocks(batch, shares)), ("LOSS", loss), ("BATCHES", turns(batch, 16))),
        *zip(("MIXES", "BIASES", "SHIFTS", "OUTS"), rounds, strict=True),
    )
    sizes = tuple([columns if count else 0 for count, columns in parts])
    return Plan((first + shares * tiles * heads + sum(tasks), 1), numbers, constants, shares, sizes)
