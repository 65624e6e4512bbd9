"""The fused pass over q and k in Triton, forward and backward; features and scores are never written to memory.

A program processes consecutive tokens of one head of one sample, tile by tile: norms in float32, products in the dtype
of q and k with float32 sums. Products of unnormalised queries are scaled by 1/‖q‖ afterwards, since they have fewer
entries. In backward, queries and keys are processed by separate programs, each with half the accumulators, so that more
programs fit on the GPU. Each program writes its partial sums over tokens to its own buffer; buffers are added up
afterwards in a fixed order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.layers.triton_support import Constants, blocks, kernel, launch, power_of_two


class Launch(NamedTuple):
    """Tokens per tile, warps per program, pipeline stages, and programs per multiprocessor."""

    block: int
    warps: int
    stages: int
    waves: int


# Forward and backward, by (bytes per number, whether heads are wider than 64); measured by bench/primal.py --tune.
LAUNCHES = {
    (2, False): (Launch(64, 4, 3, 8), Launch(64, 4, 3, 4)),
    (2, True): (Launch(32, 8, 2, 2), Launch(32, 8, 1, 2)),
    (4, False): (Launch(32, 8, 1, 4), Launch(16, 8, 1, 4)),
}


def attend(
    qk: Float[Tensor, "batch n 2 heads p"],
    weights: Float[Tensor, "2 batch heads p s"],
    mix: Float[Tensor, "2 s v"],
    real: Bool[Tensor, "batch n"] | None,
) -> tuple[Float[Tensor, "batch n heads v"], Float[Tensor, "2 batch heads s"]]:
    """o = eCₑ + rCᵣ of scores e = φ(q)W_e and r = φ(k)W_r with φ(q) = q/‖q‖, and Σe² and Σr²; saves q and k only."""
    result: tuple[Tensor, Tensor] = _Attend.apply(qk.contiguous(), weights.contiguous(), mix, real)
    return result


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qk: Tensor, weights: Tensor, mix: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(qk, weights, mix, real)
        result: tuple[Tensor, Tensor]
        result = (_FORWARD if torch.compiler.is_compiling() else _run_forward)(qk, weights, mix, real)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        qk, weights, mix, real = ctx.saved_tensors
        run = _BACKWARD if torch.compiler.is_compiling() else _run_backward
        grad_qk, grad_weights, grad_mix = run(qk, weights, mix, real, grad, grad_energy)
        return grad_qk, grad_weights.to(weights.dtype), grad_mix.to(mix.dtype), None


@kernel
def _load(base, row, column, row_stride, column_stride, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile of a matrix; 0 beyond its edges."""
    within = row[:, None] < rows
    if COLUMNS != WIDTH:
        within = within & (column[None, :] < COLUMNS)
    return tl.load(base + (row[:, None] * row_stride + column[None, :] * column_stride), mask=within, other=0.0)


@kernel
def _store(base, value, row, column, stride, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile in a matrix with contiguous rows."""
    within = row[:, None] < rows
    if COLUMNS != WIDTH:
        within = within & (column[None, :] < COLUMNS)
    tl.store(base + (row[:, None] * stride + column[None, :]), value.to(base.dtype.element_ty), mask=within)


@kernel
def _inverse_norms(z, real, row, rows, MASKED: tl.constexpr):
    """1/‖z‖ of each row of a tile; 0 where z is 0, at padding, and beyond the last token."""
    shown = row < rows
    if MASKED:
        shown = tl.load(real + row, mask=shown, other=0) != 0
    wide = z.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    return tl.where(shown & (square > 1e-24), tl.rsqrt(tl.maximum(square, 1e-24)), 0.0)


@kernel
def _forward(
    qk, weights, mix, real, out, energy,
    n, splits, heads, batch,
    qk_b, qk_n, qk_side, qk_h, w_side, w_b, w_h, w_p, mix_side, mix_s, mix_v,
    p: tl.constexpr, s: tl.constexpr, v: tl.constexpr, P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h, split, b = program % heads, (program // heads) % splits, (program // (heads * splits)).to(tl.int64)
    row, feature, score, value = tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, S), tl.arange(0, V)
    query, base = qk + b * qk_b + h * qk_h, weights + b * w_b + h * w_h
    left = _load(base, feature, score, w_p, 1, p, s, S).to(DOT)
    right = _load(base + w_side, feature, score, w_p, 1, p, s, S).to(DOT)
    mix_left = _load(mix, score, value, mix_s, mix_v, s, v, V).to(DOT)
    mix_right = _load(mix + mix_side, score, value, mix_s, mix_v, s, v, V).to(DOT)
    energy_left = tl.zeros((BLOCK, S), dtype=tl.float32)
    energy_right = tl.zeros((BLOCK, S), dtype=tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        start = (split * TILES + tile) * BLOCK
        rows, first = n - start, start.to(tl.int64)
        z = _load(query + first * qk_n, row, feature, qk_n, 1, rows, p, P)
        scale = _inverse_norms(z, real + b * n + first, row, rows, MASKED)
        e = tl.dot(z.to(DOT), left, input_precision=PRECISION) * scale[:, None]
        energy_left += e * e
        result = tl.dot(e.to(DOT), mix_left, input_precision=PRECISION)
        z = _load(query + qk_side + first * qk_n, row, feature, qk_n, 1, rows, p, P)
        scale = _inverse_norms(z, real + b * n + first, row, rows, MASKED)
        e = tl.dot(z.to(DOT), right, input_precision=PRECISION) * scale[:, None]
        energy_right += e * e
        result = tl.dot(e.to(DOT), mix_right, result, input_precision=PRECISION)
        _store(out + ((b * n + first) * heads + h) * v, result, row, value, heads * v, rows, v, V)
    slot = ((split * 2) * batch + b) * heads + h
    tl.store(energy + slot * s + score, tl.sum(energy_left, 0), mask=score < s)
    tl.store(energy + (slot + batch * heads) * s + score, tl.sum(energy_right, 0), mask=score < s)


@kernel
def _backward(
    qk, weights, mix, real, grad, bend, grad_qk, grad_weights, grad_mix,
    n, splits, heads, batch,
    qk_b, qk_n, qk_side, qk_h, w_side, w_b, w_h, w_p, mix_side, mix_s, mix_v, grad_b, grad_n, grad_h,
    p: tl.constexpr, s: tl.constexpr, v: tl.constexpr, P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    side, program = tl.program_id(0) % 2, tl.program_id(0) // 2
    h, split, b = program % heads, (program // heads) % splits, (program // (heads * splits)).to(tl.int64)
    row, feature, score, value = tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, S), tl.arange(0, V)
    base, slot = qk + b * qk_b + h * qk_h + side * qk_side, (side * batch + b) * heads + h
    project = _load(weights + b * w_b + h * w_h + side * w_side, feature, score, w_p, 1, p, s, S).to(DOT)
    mixing = _load(mix + side * mix_side, score, value, mix_s, mix_v, s, v, V).to(DOT)
    bent = tl.load(bend + slot * s + score, mask=score < s, other=0.0)  # the loss' gradient by scores over the scores
    sum_weights, sum_mix = tl.zeros((P, S), dtype=tl.float32), tl.zeros((V, S), dtype=tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        start = (split * TILES + tile) * BLOCK
        rows, first = n - start, start.to(tl.int64)
        g = _load(grad + b * grad_b + h * grad_h + first * grad_n, row, value, grad_n, 1, rows, v, V).to(DOT)
        z = _load(base + first * qk_n, row, feature, qk_n, 1, rows, p, P)
        scale = _inverse_norms(z, real + b * n + first, row, rows, MASKED)
        z = z.to(DOT)
        e = tl.dot(z, project, input_precision=PRECISION) * scale[:, None]
        d = tl.dot(g, tl.trans(mixing), input_precision=PRECISION) + e * bent[None, :]
        sum_mix = tl.dot(tl.trans(g), e.to(DOT), sum_mix, input_precision=PRECISION)
        along = tl.sum(e * d, 1) * scale * scale  # inner product of φ and its gradient
        d = (d * scale[:, None]).to(DOT)
        sum_weights = tl.dot(tl.trans(z), d, sum_weights, input_precision=PRECISION)
        back = tl.dot(d, tl.trans(project), input_precision=PRECISION) - z.to(tl.float32) * along[:, None]
        tokens = ((b * n + first) * 2 + side) * heads + h
        _store(grad_qk + tokens * p, back, row, feature, 2 * heads * p, rows, p, P)
    _store(grad_mix + (((split * batch + b) * heads + h) * v * 2 + side) * s, sum_mix, value, score, 2 * s, v, s, S)
    _store(grad_weights + (slot + split * 2 * batch * heads) * p * s, sum_weights, feature, score, s, p, s, S)


def _run_forward(qk: Tensor, weights: Tensor, mix: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, n, _, heads, _ = qk.shape
    s, v = mix.shape[1:]
    sizes = _launches(qk, s, v)[0]
    tiles, splits = _runs(qk, sizes)
    out = qk.new_empty(batch, n, heads, v)
    energy = qk.new_empty(splits, 2, batch, heads, s, dtype=torch.float32)
    if splits and batch:
        tensors = (qk, weights, mix, _flags(real, qk), out, energy)
        numbers = (n, splits, heads, batch, *qk.stride()[:-1], *weights.stride()[:-1], *mix.stride())
        launch(_forward, (splits * batch * heads, 1), tensors, numbers, _constants(qk, s, v, real, sizes, tiles))
    return out, energy.sum(0)


def _run_backward(
    qk: Tensor, weights: Tensor, mix: Tensor, real: Tensor | None, grad: Tensor, grad_energy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _, heads, p = qk.shape
    s, v = mix.shape[1:]
    sizes = _launches(qk, s, v)[1]
    tiles, splits = _runs(qk, sizes)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    bend = (2 * grad_energy).float().contiguous()
    grad_qk = qk.new_empty(batch, n, 2, heads, p)
    grad_weights = qk.new_empty(splits, 2, batch, heads, p, s, dtype=torch.float32)
    grad_mix = qk.new_empty(splits * batch * heads, v, 2, s, dtype=torch.float32)
    if splits and batch:
        tensors = (qk, weights, mix, _flags(real, qk), grad, bend, grad_qk, grad_weights, grad_mix)
        strides = (*qk.stride()[:-1], *weights.stride()[:-1], *mix.stride(), *grad.stride()[:3])
        constants = _constants(qk, s, v, real, sizes, tiles)
        launch(_backward, (2 * splits * batch * heads, 1), tensors, (n, splits, heads, batch, *strides), constants)
    return grad_qk, grad_weights.sum(0), grad_mix.sum(0).permute(1, 2, 0)


_FORWARD: Any = torch.library.custom_op(
    "keyquery::primal_forward",
    _run_forward,
    mutates_args=(),
    schema="(Tensor qk, Tensor weights, Tensor mix, Tensor? real) -> (Tensor, Tensor)",
)
_BACKWARD: Any = torch.library.custom_op(
    "keyquery::primal_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor qk, Tensor weights, Tensor mix, Tensor? real, Tensor grad, Tensor grad_energy)"
    " -> (Tensor, Tensor, Tensor)",
)


@_FORWARD.register_fake
def _shape_forward(qk: Tensor, weights: Tensor, mix: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, n, _, heads, _ = qk.shape
    out = qk.new_empty(batch, n, heads, mix.shape[-1])
    return out, qk.new_empty(2, batch, heads, mix.shape[1], dtype=torch.float32)


@_BACKWARD.register_fake
def _shape_backward(
    qk: Tensor, weights: Tensor, mix: Tensor, real: Tensor | None, grad: Tensor, grad_energy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weights = weights.new_empty(weights.shape, dtype=torch.float32)
    s, v = mix.shape[1:]
    return qk.new_empty(qk.shape), grad_weights, mix.new_empty(v, 2, s, dtype=torch.float32).permute(1, 2, 0)


def _launches(qk: Tensor, s: int, v: int) -> tuple[Launch, Launch]:
    return LAUNCHES[qk.dtype.itemsize, max(qk.shape[-1], s, v) > 64]


def _runs(qk: Tensor, launch: Launch) -> tuple[int, int]:
    """Tiles per program (a power of two: few kernels are compiled), and programs per head to fill the GPU."""
    batch, n, _, heads, _ = qk.shape
    cores = _cores(qk.device) if qk.is_cuda else 1
    programs = max(1, cores * launch.waves // max(batch * heads, 1))
    # At least two: for a single tile, without a loop, Triton 3.6 generates wrong code on Hopper.
    tiles = 1 << max(1, (blocks(n, programs * launch.block)).bit_length() - 1)
    return tiles, blocks(n, tiles * launch.block)


@lru_cache(maxsize=16)
def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _constants(qk: Tensor, s: int, v: int, real: Tensor | None, sizes: Launch, tiles: int) -> Constants:
    """Compile-time constants of a kernel, in capitals those of its tiles, at least 16, and options of its launch."""
    widths = {"p": qk.shape[-1], "s": s, "v": v}
    widths |= {name.upper(): max(16, power_of_two(size)) for name, size in widths.items()}
    exact = qk.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    # The interpreter, used on a CPU, does not support products in bfloat16.
    dots = {"DOT": qk.dtype if qk.is_cuda else torch.float32, "PRECISION": "ieee" if exact else "tf32"}
    facts = {"MASKED": real is not None, "TILES": tiles, "BLOCK": sizes.block, **dots}
    return tuple({**widths, **facts, "STAGES": sizes.stages, "num_warps": sizes.warps}.items())


def _flags(real: Tensor | None, other: Tensor) -> Tensor:
    """A mask as integers that a kernel can load; `other` as a placeholder if there is none."""
    return other if real is None else real.contiguous().view(torch.uint8)
