"""A primal layer as one autograd function on a GPU: projections, scores, output and loss.

Up to some hundred thousand tokens, starting the kernels of a step takes longer than running them, so there are few:
weights are cast together, kernels find the sampled tokens themselves and add biases and the loss, and matrix products
write gradients of float32 parameters in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from keyquery.layers.primal.kernels.loss import objective
from keyquery.layers.primal.kernels.sample import add_to_tokens, launch_combine, sum_directions
from keyquery.layers.primal.kernels.scores import added, launch_backward, launch_forward

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


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """Tensors in another dtype; outside of a compiler all in one kernel."""
    old = [t for t in tensors if t is not None and t.dtype != dtype]
    if torch.compiler.is_compiling() or len(old) < 2:
        return [None if t is None else t.to(dtype) for t in tensors]
    new = [torch.empty_like(t, dtype=dtype) for t in old]
    torch._foreach_copy_(new, old)
    cast = iter(new)
    return [t if t is None or t.dtype == dtype else next(cast) for t in tensors]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """ab in `dtype`, without rounding to that of a and b in between."""
    if WIDENING and a.is_cuda and dtype == torch.float32 != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


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
        ctx.feature, ctx.dtype, ctx.to_x = feature, x.dtype, to_x
        ctx.biased = tuple(bias is not None for bias in (query_key_bias, concat_bias, output_bias))
        own = _cast(dtype, query_key, query_key_bias, output, output_bias)
        x = x.to(dtype)
        qk = linear(x, *own[:2])
        run = _FORWARD if torch.compiler.is_compiling() else _run_forward
        joined, losses, energy, pull, bend, weights = run(
            x, qk, directions, log_lambda, concat, concat_bias, feature, eta
        )
        out = linear(joined, *own[2:])
        small = energy, pull, bend, directions, log_lambda, own[0], own[2]
        ctx.save_for_backward(x, qk, weights, concat, joined, *small)
        ctx.mark_non_differentiable(energy, weights)
        return out, losses.sum(), energy, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, gain: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, qk, weights, concat, joined, energy, pull, bend, directions, log_lambda, own, output = ctx.saved_tensors
        short, exact = x.dtype, concat.dtype
        flat = (torch.zeros_like(x) if grad is None else grad.to(short)).flatten(0, 1)
        total = flat.sum(0, dtype=torch.float32)
        run = _BACKWARD if torch.compiler.is_compiling() else _run_backward
        grad_qk, grad_weights, grad_concat, grad_bias = run(
            qk, weights, concat, torch.mm(flat, output).view(joined.shape), bend, gain, ctx.feature, ctx.biased[0]
        )
        grad_output = _product(flat.mT, joined.flatten(0, 1), exact)
        flat = grad_qk.flatten(0, 1)
        grad_x = _product(flat, own, ctx.dtype).view(x.shape) if ctx.to_x else None
        run = _SAMPLED if torch.compiler.is_compiling() else _run_sampled
        grad_directions, grad_lambda = run(x, directions, log_lambda, grad_weights, energy, pull, gain, grad_x)
        grad_query_key = _product(flat.mT, x.flatten(0, 1), exact)
        grad_concat_bias = None
        if ctx.biased[1]:  # the sum over tokens and heads of the gradient of the heads' outputs
            grad_concat_bias = (total.to(short) @ output).view(len(log_lambda), -1).sum(0, dtype=exact)
        return (
            grad_x,
            grad_directions.to(exact),
            None if gain is None else grad_lambda.to(exact),
            *(grad_query_key, grad_bias.to(exact) if ctx.biased[0] else None),
            *(grad_concat.to(exact), grad_concat_bias),
            *(grad_output, total.to(exact) if ctx.biased[2] else None),
            *(None, None, None, None),
        )


def _mix(concat: Tensor) -> Tensor:
    """Cₑ and Cᵣ (2, s, v) of the map of [e; r]."""
    return concat.view(len(concat), 2, -1).permute(1, 2, 0)


def _run_forward(
    x: Tensor,
    qk: Tensor,
    directions: Tensor,
    log_lambda: Tensor,
    concat: Tensor,
    concat_bias: Tensor | None,
    feature: str,
    eta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Heads' outputs, the loss per sample and head with its derivatives, and projection weights."""
    batch, n, _ = x.shape
    directions = directions[:, :, :n]
    weights = launch_combine(x, None, directions, None)
    qk = qk.view(batch, n, 2, len(log_lambda), -1)
    joined, parts, _ = launch_forward(qk, weights, _mix(concat), concat_bias, None, feature, False)
    return joined.view(batch, n, -1), *objective(parts, directions, log_lambda, n, eta), weights


def _run_backward(
    qk: Tensor,
    weights: Tensor,
    concat: Tensor,
    inner: Tensor,
    bend: Tensor,
    gain: Tensor | None,
    feature: str,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q and k, projection weights, the map of [e; r] and the bias of q and k."""
    batch, n, _ = qk.shape
    heads = weights.shape[2]
    grad_qk, grad_weights, grad_concat, grad_bias = launch_backward(
        qk.view(batch, n, 2, heads, -1), weights, _mix(concat), None, feature, inner.view(batch, n, heads, -1),
        None if gain is None else bend, gain, None, biased,
    )  # fmt: skip
    summed = grad_concat.sum((0, 1, 2)).flatten(1)
    return grad_qk.view(qk.shape), added(grad_weights), summed, grad_bias.sum((0, 1)).flatten()


def _run_sampled(
    x: Tensor,
    directions: Tensor,
    log_lambda: Tensor,
    grad_weights: Tensor,
    energy: Tensor,
    pull: Tensor,
    gain: Tensor | None,
    grad_x: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of directions and log Λ; that of the sampled tokens is added to `grad_x`."""
    used = directions[:, :, : x.shape[1]]
    if grad_x is not None:
        add_to_tokens(grad_x, None, used, None, grad_weights, x)
    loss = None if gain is None else (log_lambda, energy, pull, gain)
    return sum_directions(x, None, used, None, grad_weights, directions.shape[2], loss)


_LIBRARY = torch.library.Library("keyquery", "FRAGMENT")


def _operator(name: str, run: Any, shapes: Any, schema: str) -> Any:
    """An operator that torch.compile does not look into; defined directly, since `custom_op` adds checks per call."""
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"keyquery::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.keyquery, name).default


def _shape_forward(
    x: Tensor, qk: Tensor, directions: Tensor, log_lambda: Tensor, concat: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    batch, n, dim = x.shape
    heads, s = log_lambda.shape
    exact = log_lambda.new_empty(0, dtype=torch.float32)
    weights = x.new_empty(2, batch, heads, dim // heads, -(-s // 8) * 8)[..., :s]
    per_head = exact.new_empty(batch, heads), exact.new_empty(2, batch, heads, s), exact.new_empty(batch, heads)
    return x.new_empty(batch, n, heads * len(concat)), *per_head, exact.new_empty(batch, heads, s), weights


def _shape_backward(qk: Tensor, weights: Tensor, concat: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    exact = weights.new_empty(0, dtype=torch.float32)
    biased = rest[-1]
    shapes = weights.shape, concat.shape, (qk.shape[-1] if biased else 0,)
    return qk.new_empty(qk.shape), *(exact.new_empty(shape) for shape in shapes)


def _shape_sampled(x: Tensor, directions: Tensor, log_lambda: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return directions.new_empty(directions.shape, dtype=torch.float32), log_lambda.new_empty(
        log_lambda.shape, dtype=torch.float32
    )


_FORWARD = _operator(
    "primal_whole_forward",
    _run_forward,
    _shape_forward,
    "(Tensor x, Tensor qk, Tensor directions, Tensor log_lambda, Tensor concat, Tensor? concat_bias, str feature,"
    " float eta) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_BACKWARD = _operator(
    "primal_whole_backward",
    _run_backward,
    _shape_backward,
    "(Tensor qk, Tensor weights, Tensor concat, Tensor inner, Tensor bend, Tensor? gain, str feature, bool biased)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
_SAMPLED = _operator(
    "primal_whole_sampled",
    _run_sampled,
    _shape_sampled,
    "(Tensor x, Tensor directions, Tensor log_lambda, Tensor grad_weights, Tensor energy, Tensor pull, Tensor? gain,"
    " Tensor(a!)? grad_x) -> (Tensor, Tensor)",
)
