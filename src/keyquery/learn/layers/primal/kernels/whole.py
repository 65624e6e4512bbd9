"""A primal layer as one autograd function on a GPU: projections, scores, output and loss.

Up to some hundred thousand tokens, starting the kernels of a step takes longer than running them, so there are few:
inputs and weights are cast together, kernels find the sampled tokens themselves and add biases and the loss, one kernel
adds up all partial sums, and matrix products write gradients of float32 parameters in float32. For the compiler forward
and backward are one operator each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from keyquery.learn.layers.primal.kernels.finish import Loss, Sums, launch_finish
from keyquery.learn.layers.primal.kernels.loss import objective
from keyquery.learn.layers.primal.kernels.prepare import launch_prepare
from keyquery.learn.layers.primal.kernels.scores import added, launch_backward, launch_forward
from keyquery.learn.layers.primal.kernels.tiles import part_sums

WIDENING = hasattr(torch.ops.aten.mm, "dtype")  # products of half precision with float32 outputs


class Weights(NamedTuple):
    """Parameters of a layer: directions, log Λ, and weights and biases of its three linear maps."""

    directions: Tensor
    log_lambda: Tensor
    query_key: Tensor
    query_key_bias: Tensor | None
    concat: Tensor
    concat_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None


def attend(
    x: Tensor, weights: Weights, feature: str, eta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and eta·mean J², with gradients; energies and projection weights without.

    Products are computed in `dtype`. There must be tokens, and no padding.
    """
    out: tuple[Tensor, Tensor, Tensor, Tensor]
    out = _Whole.apply(x, *weights, feature, eta, dtype, x.requires_grad)
    return out


def _in_dtype(own: Any, cast: Tensor, dtype: torch.dtype) -> Any:
    """A tensor, or None, as it is if it has the dtype, otherwise the cast one of `launch_prepare`."""
    return own if own is None or own.dtype == dtype else cast


def _rows(directions: Tensor, n: int) -> Tensor:
    """Those of the directions that n tokens use."""
    return directions if directions.shape[2] <= n else directions[:, :, :n]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """ab in `dtype`, without rounding to that of a and b in between."""
    if WIDENING and a.is_cuda and dtype == torch.float32 != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    out = torch.mm(a, b)
    return out if out.dtype == dtype else out.to(dtype)


class _Whole(torch.autograd.Function):
    """Saves x, q and k, the heads' outputs, and small matrices; features and scores are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        directions: Tensor,
        log_lambda: Tensor,
        query_key: Tensor,
        query_key_bias: Tensor | None,
        concat: Tensor,
        concat_bias: Tensor | None,
        output: Tensor,
        output_bias: Tensor | None,
        feature: str,
        eta: float,
        dtype: torch.dtype,
        to_x: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # skip the backward of the loss if it is unused
        maps = query_key, query_key_bias, concat, concat_bias, output, output_bias
        run = _FORWARD if torch.compiler.is_compiling() else _run_forward
        out, loss, energy, weights, *kept = run(x, directions, log_lambda, *maps, feature, eta, dtype)
        biased = [bias is not None for bias in (query_key_bias, concat_bias, output_bias)]
        ctx.options = feature, x.dtype, to_x, biased
        new_x, new_map, new_output, qk, joined, pull, bend = kept
        x, query_key = _in_dtype(x, new_x, dtype), _in_dtype(query_key, new_map, dtype)
        small = energy, pull, bend, directions, log_lambda, query_key, _in_dtype(output, new_output, dtype)
        ctx.save_for_backward(x, qk, weights, concat, joined, *small)
        ctx.mark_non_differentiable(energy, weights)
        return out, loss, energy, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, gain: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        run: Any = _BACKWARD if torch.compiler.is_compiling() else _run_backward
        feature, dtype, to_x, biased = ctx.options
        of_x, of_directions, of_lambda, of_query_key, of_bias, of_concat, of_shift, of_output, of_output_bias = run(
            grad, gain, *ctx.saved_tensors, feature, dtype, to_x, biased
        )
        return (
            of_x if to_x else None,
            *(of_directions, None if gain is None else of_lambda),
            *(of_query_key, of_bias if biased[0] else None),
            *(of_concat, of_shift if biased[1] else None),
            *(of_output, of_output_bias if biased[2] else None),
            *(None, None, None, None),
        )


def _mix(concat: Tensor) -> Tensor:
    """Cₑ and Cᵣ (2, s, v) of the map of [e; r]."""
    return concat.view(concat.shape[0], 2, -1).permute(1, 2, 0)


def _run_forward(
    x: Tensor,
    directions: Tensor,
    log_lambda: Tensor,
    query_key: Tensor,
    query_key_bias: Tensor | None,
    concat: Tensor,
    concat_bias: Tensor | None,
    output: Tensor,
    output_bias: Tensor | None,
    feature: str,
    eta: float,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """The output, the loss, energies and projection weights, and what backward needs.

    That is x and two maps, cast, q and k, the heads' outputs, and derivatives of the loss by J and by scores.
    """
    batch, n, _ = x.shape
    maps, rows = (query_key, output, query_key_bias, output_bias), _rows(directions, n)
    weights, casts = launch_prepare(x, None, rows, None, dtype, maps)
    bias = _in_dtype(query_key_bias, casts[3], dtype)
    qk = linear(_in_dtype(x, casts[0], dtype), _in_dtype(query_key, casts[1], dtype), bias)
    wide = qk.view(batch, n, 2, log_lambda.shape[0], -1)
    joined, parts, _ = launch_forward(wide, weights, _mix(concat), concat_bias, None, feature, False)
    losses, energy, pull, bend = objective(parts, rows, log_lambda, n, eta)
    joined = joined.view(batch, n, -1)
    out = linear(joined, _in_dtype(output, casts[2], dtype), _in_dtype(output_bias, casts[4], dtype))
    return out, losses.sum(), energy, weights, *casts[:3], qk, joined, pull, bend


def _run_backward(
    grad: Tensor | None,
    gain: Tensor | None,
    x: Tensor,
    qk: Tensor,
    weights: Tensor,
    concat: Tensor,
    joined: Tensor,
    energy: Tensor,
    pull: Tensor,
    bend: Tensor,
    directions: Tensor,
    log_lambda: Tensor,
    query_key: Tensor,
    output: Tensor,
    feature: str,
    dtype: torch.dtype,
    to_x: bool,
    biased: list[bool],
) -> tuple[Tensor, ...]:
    """Gradients of x, in `dtype`, directions, log Λ, and weights and biases of the three maps."""
    batch, n, _ = x.shape
    exact, heads = concat.dtype, log_lambda.shape[0]
    flat = (torch.zeros_like(x) if grad is None else grad.to(x.dtype)).flatten(0, 1)
    inner = torch.mm(flat, output).view(batch, n, heads, -1)
    grad_qk, parts, mixes, biases, shifts = launch_backward(
        qk.view(batch, n, 2, heads, -1), weights, _mix(concat), None, feature, inner,
        None if gain is None else bend, gain, None, biased[0], biased[1],
    )  # fmt: skip
    back = grad_qk.view(batch * n, -1)
    grad_x = _product(back, query_key, dtype).view(x.shape) if to_x else None
    loss = None if gain is None else Loss(log_lambda, energy, pull, gain)
    sums = Sums(mixes, biases, shifts, part_sums(flat) if biased[2] else parts.new_empty(0, flat.shape[1]))
    grad_directions, grad_lambda, (of_mix, of_bias, of_shift, of_output_bias) = launch_finish(
        x, None, _rows(directions, n), None, added(parts), directions.shape[2], grad_x, loss, sums
    )
    small: tuple[Tensor, ...] = (
        grad_directions,
        grad_lambda,
        of_bias,
        of_mix.view(concat.shape),
        of_shift,
        of_output_bias,
    )
    if exact != torch.float32:
        small = tuple([t.to(exact) for t in small])
    return (
        x.new_empty(0, dtype=dtype) if grad_x is None else grad_x,
        *(*small[:2], _product(back.mT, x.flatten(0, 1), exact), *small[2:5]),
        *(_product(flat.mT, joined.view(batch * n, -1), exact), small[5]),
    )


_LIBRARY = torch.library.Library("keyquery", "FRAGMENT")


def _operator(name: str, run: Any, shapes: Any, schema: str) -> Any:
    """An operator that torch.compile does not look into; defined directly, since `custom_op` adds checks per call."""
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"keyquery::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.keyquery, name).default


def _shape_forward(
    x: Tensor,
    directions: Tensor,
    log_lambda: Tensor,
    query_key: Tensor,
    query_key_bias: Tensor | None,
    concat: Tensor,
    concat_bias: Tensor | None,
    output: Tensor,
    output_bias: Tensor | None,
    feature: str,
    eta: float,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    batch, n, dim = x.shape
    heads, s = log_lambda.shape
    short, exact = x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)
    weights = short.new_empty(2, batch, heads, dim // heads, -(-s // 8) * 8)[..., :s]
    casts = [short.new_empty(t.shape if t.dtype != dtype else 0) for t in (x, query_key, output)]
    wide = short.new_empty(batch, n, len(query_key)), short.new_empty(batch, n, heads * len(concat))
    small = exact.new_empty(batch, heads), exact.new_empty(batch, heads, s)
    out = short.new_empty(batch, n, len(output)), exact.new_empty(()), exact.new_empty(2, batch, heads, s), weights
    return *out, *casts, *wide, *small


def _shape_backward(
    grad: Tensor | None, gain: Tensor | None, x: Tensor, qk: Tensor, weights: Tensor, concat: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *_, directions, log_lambda, query_key, output, _, dtype, to_x, biased = rest
    sizes = (len(query_key), len(concat), len(output))
    biases = [concat.new_empty(size if has else 0) for size, has in zip(sizes, biased, strict=True)]
    return (
        x.new_empty(x.shape if to_x else 0, dtype=dtype),
        *(t.new_empty(t.shape, dtype=concat.dtype) for t in (directions, log_lambda)),
        *(query_key.new_empty(query_key.shape, dtype=concat.dtype), biases[0]),
        *(concat.new_empty(concat.shape), biases[1]),
        *(output.new_empty(output.shape, dtype=concat.dtype), biases[2]),
    )


_FORWARD = _operator(
    "primal_whole_forward",
    _run_forward,
    _shape_forward,
    "(Tensor x, Tensor directions, Tensor log_lambda, Tensor query_key, Tensor? query_key_bias, Tensor concat,"
    " Tensor? concat_bias, Tensor output, Tensor? output_bias, str feature, float eta, ScalarType dtype)"
    f" -> ({', '.join(['Tensor'] * 11)})",
)
_BACKWARD = _operator(
    "primal_whole_backward",
    _run_backward,
    _shape_backward,
    "(Tensor? grad, Tensor? gain, Tensor x, Tensor qk, Tensor weights, Tensor concat, Tensor joined, Tensor energy,"
    " Tensor pull, Tensor bend, Tensor directions, Tensor log_lambda, Tensor query_key, Tensor output, str feature,"
    f" ScalarType dtype, bool to_x, bool[] biased) -> ({', '.join(['Tensor'] * 9)})",
)
