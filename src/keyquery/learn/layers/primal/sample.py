"""Evenly spaced tokens f(X), and the projection weights W_e|X = f(X)ᵀWe, W_r|X = f(X)ᵀWr."""

from __future__ import annotations

import sys
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear, pad


def evenly(
    n: int, most: int, real: Bool[Tensor, "batch n"] | None, device: torch.device
) -> tuple[Int[Tensor, "*batch rows"], Bool[Tensor, "batch rows"] | None]:
    """Indices of min(most, n) evenly spaced tokens, including first and last; of real tokens if `real` is not None.

    A sample with fewer real tokens than rows uses only its first rows; the second output marks them.
    """
    rows = min(most, n)
    row = torch.arange(rows, device=device)
    if real is None:
        return row * (n - 1) // max(rows - 1, 1), None
    count = real.sum(1, keepdim=True)
    used = count.clamp(max=rows)
    among = row * (count - 1) // (used - 1).clamp(min=1)  # rank among the real tokens
    place = torch.searchsorted(real.cumsum(1), among.minimum(count - 1) + 1).clamp(max=n - 1)
    return place, row < used


def take(x: Float[Tensor, "batch n d"], place: Int[Tensor, "*batch rows"]) -> Float[Tensor, "batch rows d"]:
    """Tokens of x at these indices."""
    if place.ndim == 1:
        return x[:, place]
    return x.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def combine(
    x: Float[Tensor, "batch n d"],
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
) -> Float[Tensor, "2 batch heads p s"]:
    """W_e|X = Σⱼ xⱼWe[j]ᵀ and W_r|X = Σⱼ xⱼWr[j]ᵀ of every head, over sampled tokens."""
    heads, s = directions.shape[1], directions.shape[-1]
    products = torch.bmm(_flat(_tokens(x, place, used), heads).mT, _aligned(_beside(directions)))
    weights = products.unflatten(1, (len(x), x.shape[-1] // heads))[..., : 2 * s]
    return weights.unflatten(-1, (2, s)).permute(3, 1, 0, 2, 4)


def uncombine(
    x: Float[Tensor, "batch n d"],
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
    grad_weights: Float[Tensor, "2 batch heads p s"],
    grad_x: Float[Tensor, "batch n d"],
) -> Float[Tensor, "2 heads rows s"]:
    """Backward of `combine`: adds the gradient of x to `grad_x`, and returns that of directions."""
    heads = directions.shape[1]
    batch = len(x)
    p = grad_weights.shape[3]
    flat = grad_weights.to(x.dtype).permute(2, 1, 3, 0, 4).reshape(heads, batch * p, -1)
    own = torch.bmm(_beside(directions), flat.mT).unflatten(2, (batch, p)).permute(2, 1, 0, 3).flatten(2)
    _add(grad_x, place, own, used)
    table = torch.bmm(_flat(_tokens(x, place, used), heads), _aligned(flat))[..., : flat.shape[-1]]
    return table.unflatten(-1, (2, -1)).permute(2, 0, 1, 3)


def _tokens(x: Tensor, place: Tensor, used: Tensor | None) -> Float[Tensor, "batch rows d"]:
    sample = take(x, place)
    return sample if used is None else sample * used.unsqueeze(-1)


def _flat(sample: Float[Tensor, "batch rows d"], heads: int) -> Float[Tensor, "heads rows columns"]:
    """Samples side by side, one matrix per head, so that directions are not copied per sample."""
    return sample.unflatten(-1, (heads, -1)).permute(2, 1, 0, 3).flatten(2)


def _beside(directions: Float[Tensor, "2 heads rows s"]) -> Float[Tensor, "heads rows both"]:
    """[We, Wr] side by side."""
    return directions.permute(1, 2, 0, 3).flatten(2)


def _aligned(matrix: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rows wide"]:
    """Columns zero-padded to a multiple of 8: other sizes are many times slower on a GPU."""
    return matrix if matrix.shape[-1] % 8 == 0 else pad(matrix, (0, -matrix.shape[-1] % 8))


def project(
    x: Float[Tensor, "batch n d"],
    weight: Float[Tensor, "both d"],
    bias: Float[Tensor, " both"] | None,
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
    impl: str,
) -> tuple[Float[Tensor, "batch n both"], Float[Tensor, "2 batch heads p s"]]:
    """Queries and keys Wx + b, and projection weights of sampled tokens.

    One autograd function: f(X) is gathered again in backward, not stored, and its gradient is added to that of x in
    place, instead of a second gradient as large as x.
    """
    qk, weights = _Project.apply(x, place, directions, used, impl, weight, bias)  # type: ignore[no-untyped-call]
    return qk, weights


def weigh(
    x: Float[Tensor, "batch n d"],
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
    impl: str,
) -> Float[Tensor, "2 batch heads p s"]:
    """Projection weights of sampled tokens only."""
    return _Weigh.apply(x, place, directions, used, impl)  # type: ignore[no-untyped-call]


def sampled(weights: Tensor) -> Float[Tensor, "batch rows d"]:
    """f(X), from the tensors that autograd saved; raises RuntimeError once they are freed."""
    assert weights.grad_fn is not None
    x, place, *_ = weights.grad_fn.saved_tensors  # type: ignore[attr-defined]
    return take(x, place)


def _module(impl: str) -> Any:
    if impl == "reference":
        return sys.modules[__name__]
    import keyquery.learn.layers.primal.kernels.sample as kernels  # on use only

    return kernels


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        place: Tensor,
        directions: Tensor,
        used: Tensor | None,
        impl: str,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, place, directions, used, weight)
        ctx.biased, ctx.impl = bias is not None, impl
        return linear(x, weight, bias), _module(impl).combine(x, place, directions, used)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_qk: Tensor | None, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        x, place, directions, used, weight = ctx.saved_tensors
        grad_x = torch.zeros_like(x) if grad_qk is None else grad_qk @ weight
        grad_weight = grad_bias = grad_directions = None
        if grad_qk is not None:
            flat = grad_qk.flatten(0, 1)
            grad_weight = flat.mT @ x.flatten(0, 1)
            grad_bias = flat.sum(0) if ctx.biased else None
        if grad_weights is not None:
            grad_directions = _module(ctx.impl).uncombine(x, place, directions, used, grad_weights, grad_x)
        return grad_x, None, grad_directions, None, None, grad_weight, grad_bias


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, directions: Tensor, used: Tensor | None, impl: str) -> Tensor:
        ctx.save_for_backward(x, place, directions, used)
        ctx.impl = impl
        weights: Tensor = _module(impl).combine(x, place, directions, used)
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        x, place, directions, used = ctx.saved_tensors
        grad_x = torch.zeros_like(x)
        grad_directions = _module(ctx.impl).uncombine(x, place, directions, used, grad_weights, grad_x)
        return grad_x, None, grad_directions, None, None


def _add(x: Tensor, place: Tensor, more: Tensor, used: Tensor | None) -> None:
    """x[place] += more, in place; indices are distinct, except unused ones."""
    if place.ndim == 1:
        x.index_copy_(1, place, x[:, place] + more)  # no atomic sums
        return
    assert used is not None
    index = place.unsqueeze(-1).expand_as(more)
    x.scatter_add_(1, index, more * used.unsqueeze(-1))
