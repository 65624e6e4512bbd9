"""The heart of a primal layer as Triton kernels: one pass over q and k forward, one backward, features never written.

A program takes one head of one sample and a run of its tokens, tile by tile: norms in float32, products in the dtype of
q and k with float32 sums. What it sums over tokens (Gram matrices, gradients of maps) goes to a place of its own; the
places of a head are added up afterwards, in a fixed order. Signatures are those of `reference`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.layers.jit import kernel
from keyquery.layers.primal.features import FUSED


class Launch(NamedTuple):
    """Tokens of a tile, warps of a program, depth of its pipeline, and programs wanted for each multiprocessor."""

    block: int
    warps: int
    stages: int
    waves: int


DOTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# Forward and backward, by (bytes of a number, whether heads are wider than 64); measured by bench/primal.py --tune.
LAUNCHES = {
    (2, False): (Launch(64, 4, 3, 4), Launch(64, 4, 2, 4)),
    (2, True): (Launch(32, 8, 2, 2), Launch(32, 8, 1, 2)),
    (4, False): (Launch(32, 8, 1, 4), Launch(16, 8, 1, 4)),
}


@kernel
def _inside(row, column, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Which entries of a tile lie within a matrix; columns are checked only where the tile is wider than it."""
    inside = row[:, None] < rows
    if COLUMNS != WIDTH:
        inside = inside & (column[None, :] < COLUMNS)
    return inside


@kernel
def _load(base, row, column, stride, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of a matrix whose columns stand side by side, 0 beyond its edges."""
    at = base + row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(at, mask=_inside(row, column, rows, COLUMNS, WIDTH), other=0.0)


@kernel
def _small(base, row, column, row_stride, column_stride, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """A small matrix, or its transpose."""
    at = base + row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(at, mask=_inside(row, column, rows, COLUMNS, WIDTH), other=0.0)


@kernel
def _store(base, value, row, column, stride, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    at = base + row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=_inside(row, column, rows, COLUMNS, WIDTH))


@kernel
def _features(z, real, FEATURE: tl.constexpr):
    """φ in float32, 0 at padding, and what its gradient is multiplied by."""
    z = z.to(tl.float32)
    if FEATURE == 0:  # cosine
        square = tl.sum(z * z, 1)
        scale = tl.where(square > 1e-24, tl.rsqrt(tl.maximum(square, 1e-24)), 0.0) * real
        phi = z * scale[:, None]
    else:
        scale = real
        if FEATURE == 1:  # elu + 1
            phi = tl.where(z > 0, z + 1, tl.exp(tl.minimum(z, 0.0))) * scale[:, None]
        else:
            phi = z * scale[:, None]
    return phi, scale


@kernel
def _through(grad, phi, scale, FEATURE: tl.constexpr):
    """The gradient of z of that of φ(z)."""
    if FEATURE == 0:
        grad = grad - phi * tl.sum(grad * phi, 1)[:, None]
    elif FEATURE == 1:
        grad = grad * tl.minimum(phi, 1.0)
    return grad * scale[:, None]


@kernel
def _real(real, row, n, MASKED: tl.constexpr):
    """1 for real tokens, 0 for padding and beyond the last."""
    shown = row < n
    if MASKED:
        shown = tl.load(real + row, mask=shown, other=0) != 0
    return shown.to(tl.float32)


@kernel
def _forward(
    qk, maps, bias, real, out, grams,
    n, splits, heads, batch,
    qk_b, qk_n, qk_side, qk_h, maps_side, maps_b, maps_h, maps_p, maps_v,
    p: tl.constexpr, v: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    FEATURE: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h, split, b = program % heads, (program // heads) % splits, (program // (heads * splits)).to(tl.int64)
    row, feature, value = tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, V)
    query = qk + b * qk_b + h * qk_h
    key = query + qk_side
    own = maps + b * maps_b + h * maps_h
    to_query = _small(own, feature, value, maps_p, maps_v, p, v, V).to(DOT)
    to_key = _small(own + maps_side, feature, value, maps_p, maps_v, p, v, V).to(DOT)
    offset = tl.load(bias + value, mask=value < v, other=0.0).to(tl.float32)
    gram_query = tl.zeros((P, P), dtype=tl.float32)
    gram_key = tl.zeros((P, P), dtype=tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        at = (split * TILES + tile) * BLOCK + row
        shown = _real(real + b * n, at, n, MASKED)
        phi, _ = _features(_load(query, at, feature, qk_n, n, p, P), shown, FEATURE)
        phi = phi.to(DOT)
        result = tl.dot(phi, to_query, input_precision=PRECISION)
        gram_query = tl.dot(tl.trans(phi), phi, gram_query, input_precision=PRECISION)
        phi, _ = _features(_load(key, at, feature, qk_n, n, p, P), shown, FEATURE)
        phi = phi.to(DOT)
        result = tl.dot(phi, to_key, result, input_precision=PRECISION) + offset[None, :]
        gram_key = tl.dot(tl.trans(phi), phi, gram_key, input_precision=PRECISION)
        _store(out + (b * n * heads + h) * v, result, at, value, heads * v, n, v, V)
    place = grams + (((split * 2) * batch + b) * heads + h) * p * p
    _store(place, gram_query, feature, feature, p, p, p, P)
    _store(place + batch * heads * p * p, gram_key, feature, feature, p, p, p, P)


@kernel
def _backward(
    qk, maps, real, grad, curve, grad_qk, grad_maps, grad_bias,
    n, splits, heads, batch,
    qk_b, qk_n, qk_side, qk_h, maps_side, maps_b, maps_h, maps_p, maps_v, grad_b, grad_n, grad_h,
    p: tl.constexpr, v: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    FEATURE: tl.constexpr, MASKED: tl.constexpr, CURVED: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h, split, b = program % heads, (program // heads) % splits, (program // (heads * splits)).to(tl.int64)
    row, feature, value = tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, V)
    query, grad_query = qk + b * qk_b + h * qk_h, grad_qk + (b * n * 2 * heads + h) * p
    own = maps + b * maps_b + h * maps_h
    # In float16 the loss's small numbers would vanish.
    curved = tl.bfloat16 if tl.float16 == DOT else DOT
    of_query = _small(own, value, feature, maps_v, maps_p, v, p, P).to(DOT)
    of_key = _small(own + maps_side, value, feature, maps_v, maps_p, v, p, P).to(DOT)
    if CURVED:
        bend = curve + (b * heads + h) * p * p
        bend_query = _small(bend, feature, feature, p, 1, p, p, P).to(curved)
        bend_key = _small(bend + batch * heads * p * p, feature, feature, p, 1, p, p, P).to(curved)
    sum_query = tl.zeros((P, V), dtype=tl.float32)
    sum_key = tl.zeros((P, V), dtype=tl.float32)
    sum_bias = tl.zeros((V,), dtype=tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        at = (split * TILES + tile) * BLOCK + row
        shown = _real(real + b * n, at, n, MASKED)
        g = _load(grad + b * grad_b + h * grad_h, at, value, grad_n, n, v, V).to(DOT)
        sum_bias += tl.sum(g.to(tl.float32), 0)

        phi, scale = _features(_load(query, at, feature, qk_n, n, p, P), shown, FEATURE)
        back = tl.dot(g, of_query, input_precision=PRECISION)
        if CURVED:
            back = tl.dot(phi.to(curved), bend_query, back, input_precision=PRECISION)
        sum_query = tl.dot(tl.trans(phi.to(DOT)), g, sum_query, input_precision=PRECISION)
        back = _through(back, phi, scale, FEATURE)
        _store(grad_query, back, at, feature, 2 * heads * p, n, p, P)

        phi, scale = _features(_load(query + qk_side, at, feature, qk_n, n, p, P), shown, FEATURE)
        back = tl.dot(g, of_key, input_precision=PRECISION)
        if CURVED:
            back = tl.dot(phi.to(curved), bend_key, back, input_precision=PRECISION)
        sum_key = tl.dot(tl.trans(phi.to(DOT)), g, sum_key, input_precision=PRECISION)
        back = _through(back, phi, scale, FEATURE)
        _store(grad_query + heads * p, back, at, feature, 2 * heads * p, n, p, P)
    place = grad_maps + (((split * 2) * heads + h) * batch + b) * p * v
    _store(place, sum_query, feature, value, v, p, v, V)
    _store(place + batch * heads * p * v, sum_key, feature, value, v, p, v, V)
    tl.store(grad_bias + ((split * batch + b) * heads + h) * v + value, sum_bias, mask=value < v)


def forward(
    qk: Float[Tensor, "batch n 2 heads p"],
    maps: Float[Tensor, "2 batch heads p v"],
    bias: Float[Tensor, " v"],
    real: Bool[Tensor, "batch n"] | None,
    feature: str,
) -> tuple[Float[Tensor, "batch n heads v"], Float[Tensor, "2 batch heads p p"]]:
    """As `reference.forward`."""
    run = _FORWARD if torch.compiler.is_compiling() else _run_forward
    return run(qk, maps, bias, real, feature)


def backward(
    qk: Float[Tensor, "batch n 2 heads p"],
    maps: Float[Tensor, "2 batch heads p v"],
    real: Bool[Tensor, "batch n"] | None,
    feature: str,
    grad: Float[Tensor, "batch n heads v"],
    grad_grams: Float[Tensor, "2 batch heads p p"] | None,
) -> tuple[Float[Tensor, "batch n 2 heads p"], Float[Tensor, "2 batch heads p v"], Float[Tensor, " v"]]:
    """As `reference.backward`."""
    run = _BACKWARD if torch.compiler.is_compiling() else _run_backward
    return run(qk, maps, real, feature, grad, grad_grams)


def _run_forward(qk: Tensor, maps: Tensor, bias: Tensor, real: Tensor | None, feature: str) -> tuple[Tensor, Tensor]:
    batch, n, _, heads, p = qk.shape
    v, shared = maps.shape[-1], _shared(qk, maps, feature, real)
    launch = _launches(qk, maps)[0]
    tiles, splits = _runs(qk, launch)
    out = torch.empty(batch, n, heads, v, dtype=qk.dtype, device=qk.device)
    grams = torch.empty(splits, 2, batch, heads, p, p, dtype=torch.float32, device=qk.device)
    if splits == 0 or batch == 0:
        return out, grams.sum(0)
    _forward[(splits * batch * heads,)](
        _lined(qk), maps, bias, _flags(real, qk), out, grams,
        n, splits, heads, batch, *_qk_strides(qk), *maps.stride(),
        TILES=tiles, BLOCK=launch.block, STAGES=launch.stages, num_warps=launch.warps, **shared,
    )  # fmt: skip
    return out, grams[0] if splits == 1 else grams.sum(0)


def _run_backward(
    qk: Tensor, maps: Tensor, real: Tensor | None, feature: str, grad: Tensor, grad_grams: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _, heads, p = qk.shape
    v, shared = maps.shape[-1], _shared(qk, maps, feature, real)
    launch = _launches(qk, maps)[1]
    tiles, splits = _runs(qk, launch)
    grad_qk = torch.empty(batch, n, 2, heads, p, dtype=qk.dtype, device=qk.device)
    # Heads before samples, as the layer makes its maps: what follows in backward needs no copy.
    grad_maps = torch.empty(splits, 2, heads, batch, p, v, dtype=torch.float32, device=qk.device)
    grad_bias = torch.empty(splits, batch, heads, v, dtype=torch.float32, device=qk.device)
    if splits == 0 or batch == 0:
        return grad_qk, grad_maps.sum(0).transpose(1, 2), grad_bias.sum((0, 1, 2))
    curve = None if grad_grams is None else (grad_grams + grad_grams.mT).contiguous()
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    _backward[(splits * batch * heads,)](
        _lined(qk), maps, _flags(real, qk), grad, qk if curve is None else curve, grad_qk, grad_maps, grad_bias,
        n, splits, heads, batch, *_qk_strides(qk), *maps.stride(),
        grad.stride(0), grad.stride(1), grad.stride(2),
        TILES=tiles, BLOCK=launch.block, STAGES=launch.stages, CURVED=curve is not None,
        num_warps=launch.warps, **shared,
    )  # fmt: skip
    grad_maps = (grad_maps[0] if splits == 1 else grad_maps.sum(0)).transpose(1, 2)
    return grad_qk, grad_maps, grad_bias.sum((0, 1, 2))


def _shared(qk: Tensor, maps: Tensor, feature: str, real: Tensor | None) -> dict[str, Any]:
    """Facts that a kernel is compiled for; a dot product takes 16 dimensions or more."""
    exact = torch.get_float32_matmul_precision() == "highest"
    # The interpreter, which is what runs on a CPU, multiplies no bfloat16.
    dot = DOTS[qk.dtype] if qk.is_cuda else tl.float32
    return {
        "p": qk.shape[-1],
        "v": maps.shape[-1],
        "P": max(16, triton.next_power_of_2(qk.shape[-1])),
        "V": max(16, triton.next_power_of_2(maps.shape[-1])),
        "FEATURE": FUSED.index(feature),
        "MASKED": real is not None,
        "DOT": dot,
        "PRECISION": "ieee" if exact and qk.dtype == torch.float32 else "tf32",
    }


def _launches(qk: Tensor, maps: Tensor) -> tuple[Launch, Launch]:
    return LAUNCHES[qk.dtype.itemsize, max(qk.shape[-1], maps.shape[-1]) > 64]


def _runs(qk: Tensor, launch: Launch) -> tuple[int, int]:
    """Tiles of a program, a power of two so that few kernels are compiled, and programs of a head to fill the GPU."""
    batch, n, _, heads, _ = qk.shape
    cores = torch.cuda.get_device_properties(qk.device).multi_processor_count if qk.is_cuda else 1
    wanted = max(1, cores * launch.waves // max(batch * heads, 1))
    tiles = 1 << max(0, (triton.cdiv(n, wanted * launch.block)).bit_length() - 1)
    return tiles, triton.cdiv(n, tiles * launch.block)


def _lined(qk: Tensor) -> Tensor:
    assert qk.stride(-1) == 1, "the features of a head must stand side by side"
    return qk


def _qk_strides(qk: Tensor) -> tuple[int, int, int, int]:
    batch, n, side, head, _ = qk.stride()
    return batch, n, side, head


def _flags(real: Tensor | None, qk: Tensor) -> Tensor:
    """Real tokens as numbers that a kernel can load; any tensor where there is no mask."""
    return qk if real is None else real.contiguous().view(torch.uint8)


_FORWARD: Any = torch.library.custom_op(
    "keyquery::primal_forward",
    _run_forward,
    mutates_args=(),
    schema="(Tensor qk, Tensor maps, Tensor bias, Tensor? real, str feature) -> (Tensor, Tensor)",
)
_BACKWARD: Any = torch.library.custom_op(
    "keyquery::primal_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor qk, Tensor maps, Tensor? real, str feature, Tensor grad, Tensor? grad_grams)"
    " -> (Tensor, Tensor, Tensor)",
)


@_FORWARD.register_fake
def _shape_forward(qk: Tensor, maps: Tensor, bias: Tensor, real: Tensor | None, feature: str) -> tuple[Tensor, Tensor]:
    batch, n, _, heads, p = qk.shape
    grams = qk.new_empty(2, batch, heads, p, p, dtype=torch.float32)
    return qk.new_empty(batch, n, heads, maps.shape[-1]), grams


@_BACKWARD.register_fake
def _shape_backward(
    qk: Tensor, maps: Tensor, real: Tensor | None, feature: str, grad: Tensor, grad_grams: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads = maps.shape[1:3]
    grad_maps = maps.new_empty(2, heads, batch, *maps.shape[3:], dtype=torch.float32).transpose(1, 2)
    return qk.new_empty(qk.shape), grad_maps, grad_maps.new_empty(maps.shape[-1:])
