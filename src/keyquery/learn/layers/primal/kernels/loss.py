"""The loss J² of a primal layer and its gradient by J, in one Triton kernel."""

from __future__ import annotations

from functools import lru_cache

import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from keyquery.layers.triton_support import Constants, blocks, kernel, launch
from keyquery.learn.layers.primal.kernels.tiles import load, turns, widths

BLOCK = 2048  # numbers of directions at a time
SPLITS = 128  # partial sums at a time


@kernel
def _objective(
    parts, directions, log_lambda, energy, loss, pull, bend,
    splits, batch, heads, size, d_side, d_h, scale, per_token,
    s: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """J of one head of one sample: its energies are added up, and scale·J² and its derivatives stored."""
    h, score, place = tl.program_id(0) % heads, tl.arange(0, S), tl.program_id(0) * s
    left = tl.zeros((S,), dtype=tl.float32)
    right = tl.zeros((S,), dtype=tl.float32)
    for turn in tl.range(0, TURNS):
        split = turn * SPLITS + tl.arange(0, SPLITS)
        left += tl.sum(load(parts + place, split, score, 2 * batch * heads * s, splits, s, S), 0)
        right += tl.sum(load(parts + place + batch * heads * s, split, score, 2 * batch * heads * s, splits, s, S), 0)
    tl.store(energy + place + score, left, mask=score < s)
    tl.store(energy + batch * heads * s + place + score, right, mask=score < s)
    trace = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in tl.range(0, TILES):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(directions + h * d_h + at, mask=at < size, other=0.0).to(tl.float32)
        trace += first * tl.load(directions + h * d_h + d_side + at, mask=at < size, other=0.0).to(tl.float32)
    weight = tl.exp(tl.load(log_lambda + h * s + score, mask=score < s, other=0.0).to(tl.float32)) * per_token
    value = tl.sum(tl.where(score < s, (left + right) * weight / 2, 0.0), 0) - tl.sum(trace, 0)
    tl.store(loss + tl.program_id(0), scale * value * value)
    tl.store(pull + tl.program_id(0), 2 * scale * value)
    tl.store(bend + place + score, 2 * scale * value * weight, mask=score < s)


def objective(
    parts: Float[Tensor, "splits 2 batch heads s"],
    directions: Float[Tensor, "2 heads rows s"],
    log_lambda: Float[Tensor, "heads s"],
    tokens: int,
    eta: float,
) -> tuple[
    Float[Tensor, "batch heads"],
    Float[Tensor, "2 batch heads s"],
    Float[Tensor, "batch heads"],
    Float[Tensor, "batch heads s"],
]:
    """eta·J² over the number of samples and heads, the energies, ∂loss/∂J, and the gradient by scores over scores."""
    _, _, batch, heads, s = parts.shape
    grid, numbers, constants = _plan(parts.shape, directions.shape, directions.stride(), tokens, eta)
    energy, bend = parts.new_empty(2, batch, heads, s), parts.new_empty(batch, heads, s)
    loss, pull = parts.new_empty(batch, heads), parts.new_empty(batch, heads)
    launch(_objective, grid, (parts, directions, log_lambda, energy, loss, pull, bend), numbers, constants)
    return loss, energy, pull, bend


@lru_cache(maxsize=256)
def _plan(
    shape: tuple[int, ...], table: tuple[int, ...], spacing: tuple[int, ...], tokens: int, eta: float
) -> tuple[tuple[int, int], tuple[float, ...], Constants]:
    """Grid, numbers and constants of the launch."""
    splits, _, batch, heads, s = shape
    size = table[2] * s
    assert spacing[2:] == (s, 1), "rows of directions must be contiguous"
    numbers = (splits, batch, heads, size, *spacing[:2], eta / (batch * heads), 1 / tokens)
    sizes = {
        "BLOCK": BLOCK,
        "TILES": blocks(size, BLOCK),
        "SPLITS": SPLITS,
        "TURNS": turns(splits, SPLITS),
        "num_warps": 8,
    }
    return (batch * heads, 1), numbers, tuple({**widths(s=s), **sizes}.items())
