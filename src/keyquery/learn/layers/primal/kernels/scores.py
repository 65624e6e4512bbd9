"""Triton implementation of a primal layer: one pass over q and k forward, one backward; features and scores are
never written to memory.

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
from torch import Tensor

from keyquery.layers.triton_support import Constants, blocks, kernel, launch
from keyquery.learn.layers.primal.features import FUSED
from keyquery.learn.layers.primal.kernels.tiles import flags, load, products, small, store, widths


class Launch(NamedTuple):
    """Tokens per tile, warps per program, pipeline stages, programs per multiprocessor, and register limit."""

    block: int
    warps: int
    stages: int
    waves: int
    registers: int | None = None


# Forward and backward, by (bytes per number, whether heads are wider than 64); measured by bench/primal.py --tune.
LAUNCHES = {
    (2, False): (Launch(64, 4, 3, 8), Launch(64, 4, 3, 4)),
    (2, True): (Launch(32, 8, 2, 2), Launch(32, 8, 1, 2)),
    (4, False): (Launch(32, 8, 1, 4), Launch(16, 8, 1, 4)),
}


@kernel
def _real(real, row, n, MASKED: tl.constexpr):
    """1 for real tokens, 0 for padding and beyond the last."""
    shown = row < n
    if MASKED:
        shown = tl.load(real + row, mask=shown, other=0) != 0
    return shown.to(tl.float32)


@kernel
def _features(z, shown, FEATURE: tl.constexpr, DOT: tl.constexpr):
    """The tile to multiply, and the factor that turns its products into those of φ: 1/‖z‖ for cosine, 0 at padding."""
    if FEATURE == 0:  # cosine
        wide = z.to(tl.float32)
        square = tl.sum(wide * wide, 1)
        shown = tl.where(square > 1e-24, tl.rsqrt(tl.maximum(square, 1e-24)), 0.0) * shown
    elif FEATURE == 1:  # elu + 1
        wide = z.to(tl.float32)
        z = tl.where(wide > 0, wide + 1, tl.exp(tl.minimum(wide, 0.0)))
    return z.to(DOT), shown


@kernel
def _bent(bend, gain, score, s: tl.constexpr, GAINED: tl.constexpr):
    """The gradient of the loss by scores over the scores."""
    bent = tl.load(bend + score, mask=score < s, other=0.0)
    return bent * tl.load(gain) if GAINED else bent


@kernel
def _curved(back, along, z, turned, square, PRECISION: tl.constexpr):
    """Both with the gradient of the Gram matrices added."""
    more = tl.dot(z.to(turned.dtype), turned, input_precision=PRECISION) * square[:, None]
    return back + more, along + tl.sum(z.to(tl.float32) * more, 1)


@kernel
def _through(back, z, along, FEATURE: tl.constexpr):
    """The gradient of z from that of its products, less its part along z for cosine."""
    if FEATURE == 0:
        back -= z.to(tl.float32) * along[:, None]
    elif FEATURE == 1:
        back *= tl.minimum(z.to(tl.float32), 1.0)
    return back


@kernel
def _gram(gram, z, scale, DOT: tl.constexpr, PRECISION: tl.constexpr):
    phi = (z.to(tl.float32) * scale[:, None]).to(DOT)
    return tl.dot(tl.trans(phi), phi, gram, input_precision=PRECISION)


@kernel
def _forward(
    qk, weights, mix, bias, real, out, energy, grams,
    n, splits, heads, batch,
    qk_b, qk_n, qk_side, qk_h, w_side, w_b, w_h, w_p, mix_side, mix_s, mix_v,
    p: tl.constexpr, s: tl.constexpr, v: tl.constexpr, P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, FEATURE: tl.constexpr, MASKED: tl.constexpr, GRAM: tl.constexpr,
    BIASED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h, split, b = program % heads, (program // heads) % splits, (program // (heads * splits)).to(tl.int64)
    row, feature, score, value = tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, S), tl.arange(0, V)
    query, own = qk + b * qk_b + h * qk_h, weights + b * w_b + h * w_h
    left = small(own, feature, score, w_p, 1, p, s, S).to(DOT)
    right = small(own + w_side, feature, score, w_p, 1, p, s, S).to(DOT)
    mix_left = small(mix, score, value, mix_s, mix_v, s, v, V).to(DOT)
    mix_right = small(mix + mix_side, score, value, mix_s, mix_v, s, v, V).to(DOT)
    if BIASED:
        shift = tl.load(bias + value, mask=value < v, other=0.0).to(tl.float32)
    energy_left = tl.zeros((BLOCK, S), dtype=tl.float32)
    energy_right = tl.zeros((BLOCK, S), dtype=tl.float32)
    if GRAM:
        gram_left = tl.zeros((P, P), dtype=tl.float32)
        gram_right = tl.zeros((P, P), dtype=tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        start = (split * TILES + tile) * BLOCK
        left_over, at = n - start, start.to(tl.int64)
        shown = _real(real + b * n + at, row, left_over, MASKED)
        z, scale = _features(load(query + at * qk_n, row, feature, qk_n, left_over, p, P), shown, FEATURE, DOT)
        e = tl.dot(z, left, input_precision=PRECISION) * scale[:, None]
        energy_left += e * e
        if GRAM:
            gram_left = _gram(gram_left, z, scale, DOT, PRECISION)
        result = tl.dot(e.to(DOT), mix_left, input_precision=PRECISION)
        z, scale = _features(
            load(query + qk_side + at * qk_n, row, feature, qk_n, left_over, p, P), shown, FEATURE, DOT
        )
        e = tl.dot(z, right, input_precision=PRECISION) * scale[:, None]
        energy_right += e * e
        if GRAM:
            gram_right = _gram(gram_right, z, scale, DOT, PRECISION)
        result = tl.dot(e.to(DOT), mix_right, result, input_precision=PRECISION)
        if BIASED:
            result += shift[None, :]
        store(out + ((b * n + at) * heads + h) * v, result, row, value, heads * v, left_over, v, V)
    place = ((split * 2) * batch + b) * heads + h
    other = place + batch * heads
    tl.store(energy + place * s + score, tl.sum(energy_left, 0), mask=score < s)
    tl.store(energy + other * s + score, tl.sum(energy_right, 0), mask=score < s)
    if GRAM:
        store(grams + place * p * p, gram_left, feature, feature, p, p, p, P)
        store(grams + other * p * p, gram_right, feature, feature, p, p, p, P)


@kernel
def _backward(
    qk, weights, mix, real, grad, bend, gain, curve, grad_qk, grad_weights, grad_mix, grad_bias, grad_shift,
    n, splits, heads, batch,
    qk_b, qk_n, qk_side, qk_h, w_side, w_b, w_h, w_p, mix_side, mix_s, mix_v, grad_b, grad_n, grad_h, bend_side,
    p: tl.constexpr, s: tl.constexpr, v: tl.constexpr, P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, FEATURE: tl.constexpr, MASKED: tl.constexpr,
    BENT: tl.constexpr, GAINED: tl.constexpr, CURVED: tl.constexpr, BIASED: tl.constexpr, SHIFTED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    side, program = tl.program_id(0) % 2, tl.program_id(0) // 2
    h, split, b = program % heads, (program // heads) % splits, (program // (heads * splits)).to(tl.int64)
    row, feature, score, value = tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, S), tl.arange(0, V)
    own, place = qk + b * qk_b + h * qk_h + side * qk_side, (side * batch + b) * heads + h
    project = small(weights + b * w_b + h * w_h + side * w_side, feature, score, w_p, 1, p, s, S).to(DOT)
    mixing = small(mix + side * mix_side, score, value, mix_s, mix_v, s, v, V).to(DOT)
    if BENT:
        bent = _bent(bend + side * bend_side + (b * heads + h) * s, gain, score, s, GAINED)
    if CURVED:
        # In float16, small gradients of the loss would underflow.
        turned = small(curve + place * p * p, feature, feature, p, 1, p, p, P)
        turned = turned.to(tl.bfloat16 if tl.float16 == DOT else DOT)
    sum_weights, sum_mix = tl.zeros((P, S), dtype=tl.float32), tl.zeros((V, S), dtype=tl.float32)
    if BIASED:
        sum_bias = tl.zeros((BLOCK, P), dtype=tl.float32)
    if SHIFTED and s == S:
        sum_shift = tl.zeros((V,), dtype=tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        start = (split * TILES + tile) * BLOCK
        left_over, at = n - start, start.to(tl.int64)
        shown = _real(real + b * n + at, row, left_over, MASKED)
        g = load(grad + b * grad_b + h * grad_h + at * grad_n, row, value, grad_n, left_over, v, V).to(DOT)
        z, scale = _features(load(own + at * qk_n, row, feature, qk_n, left_over, p, P), shown, FEATURE, DOT)
        e = tl.dot(z, project, input_precision=PRECISION) * scale[:, None]
        d = tl.dot(g, tl.trans(mixing), input_precision=PRECISION)
        beside = tl.where(score[None, :] == s, 1.0, e) if SHIFTED else e  # a spare column then holds the sum of g
        sum_mix = tl.dot(tl.trans(g), beside.to(DOT), sum_mix, input_precision=PRECISION)
        if SHIFTED and s == S:
            sum_shift += tl.sum(g.to(tl.float32), 0)
        if BENT:
            d += e * bent[None, :]
        along = tl.sum(e * d, 1)  # inner product of φ and its gradient
        d = (d * scale[:, None]).to(DOT)
        sum_weights = tl.dot(tl.trans(z), d, sum_weights, input_precision=PRECISION)
        back = tl.dot(d, tl.trans(project), input_precision=PRECISION)
        if CURVED:
            back, along = _curved(back, along, z, turned, scale * scale, PRECISION)
        back = _through(back, z, along * scale * scale, FEATURE)
        if BIASED:
            sum_bias += back
        store(grad_qk + (((b * n + at) * 2 + side) * heads + h) * p, back, row, feature, 2 * heads * p, left_over, p, P)
    part = (split * batch + b) * heads + h
    store(grad_mix + (part * v * 2 + side) * s, sum_mix, value, score, 2 * s, v, s, S)
    if BIASED:
        at = grad_bias + (((split * batch + b) * 2 + side) * heads + h) * p
        tl.store(at + feature, tl.sum(sum_bias, 0), mask=feature < p)
    if SHIFTED and s != S:
        sum_shift = tl.sum(tl.where(score[None, :] == s, sum_mix, 0.0), 1)
    if SHIFTED and side == 0:
        tl.store(grad_shift + part * v + value, sum_shift, mask=value < v)
    store(grad_weights + (place + split * 2 * batch * heads) * p * s, sum_weights, feature, score, s, p, s, S)


def launch_forward(
    qk: Tensor, weights: Tensor, mix: Tensor, bias: Tensor | None, real: Tensor | None, feature: str, gram: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o + bias, and the programs' partial sums of energies and, with `gram`, Gram matrices.

    Both are (splits, 2, batch, heads, ...).
    """
    batch, n, _, heads, p = qk.shape
    s, v = mix.shape[1:]
    sizes = _launches(qk, s, v)[0]
    tiles, splits = _runs(qk, sizes)
    out = torch.empty(batch, n, heads, v, dtype=qk.dtype, device=qk.device)
    energy = torch.empty(splits, 2, batch, heads, s, dtype=torch.float32, device=qk.device)
    grams = energy
    if gram:
        grams = torch.empty(splits, 2, batch, heads, p, p, dtype=torch.float32, device=qk.device)
    if splits and batch:
        tensors = (qk, _lined(weights), mix, qk if bias is None else bias, flags(real, qk), out, energy, grams)
        numbers = (n, splits, heads, batch, *_strides(_lined(qk)), *_strides(weights), *mix.stride())
        own = (("GRAM", gram), ("BIASED", bias is not None))
        constants = own + _shared(qk, s, v, feature, real, sizes, tiles)
        launch(_forward, (splits * batch * heads, 1), tensors, numbers, constants)
    return out, energy, grams


def launch_backward(
    qk: Tensor,
    weights: Tensor,
    mix: Tensor,
    real: Tensor | None,
    feature: str,
    grad: Tensor,
    bend: Tensor | None,
    gain: Tensor | None,
    curve: Tensor | None,
    biased: bool,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of qk, and partial sums over tokens of those of weights and mix, and of both biases, if there.

    `bend` is the gradient of the loss by the scores over the scores, (2, batch, heads, s), times the number `gain`;
    without the first dimension it is the same for e and r. Partial sums are (splits, 2, batch, heads, p, s),
    (rows, v·2·s), (rows, 2·heads·p) and (rows, v).
    """
    batch, n, _, heads, p = qk.shape
    s, v = mix.shape[1:]
    sizes = _launches(qk, s, v)[1]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    tiles, splits = _runs(qk, sizes)
    grad_qk = torch.empty(batch, n, 2, heads, p, dtype=qk.dtype, device=qk.device)
    grad_weights = torch.empty(splits, 2, batch, heads, p, s, dtype=torch.float32, device=qk.device)
    rows = splits * batch
    grad_mix = torch.empty(rows * heads, v * 2 * s, dtype=torch.float32, device=qk.device)
    grad_bias = torch.empty(rows if biased else 0, 2 * heads * p, dtype=torch.float32, device=qk.device)
    grad_shift = torch.empty(rows * heads if shifted else 0, v, dtype=torch.float32, device=qk.device)
    if splits and batch:
        tensors = (
            _lined(qk), _lined(weights), mix, flags(real, qk), grad,
            qk if bend is None else bend, qk if gain is None else gain, qk if curve is None else curve,
            grad_qk, grad_weights, grad_mix, grad_bias, grad_shift,
        )  # fmt: skip
        numbers = (
            n, splits, heads, batch, *_strides(qk), *_strides(weights), *mix.stride(), *grad.stride()[:3],
            bend.stride(0) if bend is not None and bend.ndim == 4 else 0,
        )  # fmt: skip
        own: Constants = (("BENT", bend is not None), ("GAINED", gain is not None), ("CURVED", curve is not None))
        own += (("BIASED", biased), ("SHIFTED", shifted))
        constants = own + _shared(qk, s, v, feature, real, sizes, tiles)
        launch(_backward, (2 * splits * batch * heads, 1), tensors, numbers, constants)
    return grad_qk, grad_weights, grad_mix, grad_bias, grad_shift


def _shared(qk: Tensor, s: int, v: int, feature: str, real: Tensor | None, sizes: Launch, tiles: int) -> Constants:
    """Compile-time constants of a kernel, and options of its launch."""
    return _constants(qk.shape[-1], s, v, feature, real is not None, sizes, tiles, *products(qk, qk.dtype))


@lru_cache(maxsize=256)
def _constants(p: int, s: int, v: int, feature: str, masked: bool, sizes: Launch, tiles: int, *dots: Any) -> Constants:
    facts = {"FEATURE": FUSED.index(feature), "MASKED": masked, "TILES": tiles, "BLOCK": sizes.block}
    options = {"STAGES": sizes.stages, "num_warps": sizes.warps}
    limit = {} if sizes.registers is None else {"maxnreg": sizes.registers}
    return tuple({**widths(p=p, s=s, v=v), **facts, **dict(dots), **options, **limit}.items())


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


def added(parts: Tensor) -> Tensor:
    """The total of the programs' partial sums."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _lined(tensor: Tensor) -> Tensor:
    assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
    return tensor


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride()[:-1]
