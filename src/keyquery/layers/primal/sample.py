"""Evenly spaced tokens f(X), and projection weights made of them: W_e|X = f(X)ᵀWe, W_r|X = f(X)ᵀWr."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear, pad


def evenly(
    n: int, most: int, real: Bool[Tensor, "batch n"] | None, device: torch.device
) -> tuple[Int[Tensor, "*batch rows"], Bool[Tensor, "batch rows"] | None]:
    """Places of min(most, n) evenly spaced tokens, first and last among them; of real ones, where `real` is given.

    A sample with fewer real tokens than rows fills only its first rows; which those are is told.

    >>> evenly(7, 3, None, torch.device("cpu"))[0]
    tensor([0, 3, 6])
    >>> evenly(4, 3, torch.tensor([[False, True, False, True]]), torch.device("cpu"))
    (tensor([[1, 3, 3]]), tensor([[ True,  True, False]]))
    """
    rows = min(most, n)
    row = torch.arange(rows, device=device)
    if real is None:
        return row * (n - 1) // max(rows - 1, 1), None
    count = real.sum(1, keepdim=True)
    used = count.clamp(max=rows)
    among = row * (count - 1) // (used - 1).clamp(min=1)  # the how-manieth real token
    place = torch.searchsorted(real.cumsum(1), among.minimum(count - 1) + 1).clamp(max=n - 1)
    return place, row < used


def take(x: Float[Tensor, "batch n d"], place: Int[Tensor, "*batch rows"]) -> Float[Tensor, "batch rows d"]:
    """Tokens of x at these places."""
    if place.ndim == 1:
        return x[:, place]
    return x.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def combine(
    sample: Float[Tensor, "batch rows heads p"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
) -> Float[Tensor, "heads batch p both"]:
    """f(X)ᵀ[We, Wr] of every head: Σⱼ xⱼ·[We, Wr][j]ᵀ."""
    batch, _, _, p = sample.shape
    if used is not None:
        sample = sample * used[:, :, None, None]
    found = torch.bmm(_flat(sample).mT, _aligned(beside(directions)))
    return found.unflatten(1, (batch, p))[..., : 2 * directions.shape[-1]]


def _flat(sample: Float[Tensor, "batch rows heads p"]) -> Float[Tensor, "heads rows columns"]:
    """Samples beside each other, one matrix for each head: the table of directions is not copied for each of them."""
    return sample.permute(2, 1, 0, 3).flatten(2)


def _aligned(matrix: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rows wide"]:
    """Columns filled up with zeros to a multiple of 8: products of odd sizes take a GPU many times as long."""
    return matrix if matrix.shape[-1] % 8 == 0 else pad(matrix, (0, -matrix.shape[-1] % 8))


def beside(directions: Float[Tensor, "2 heads rows s"]) -> Float[Tensor, "heads rows both"]:
    """[We, Wr] side by side."""
    return directions.permute(1, 2, 0, 3).flatten(2)


def project(
    x: Float[Tensor, "batch n d"],
    weight: Float[Tensor, "both d"],
    bias: Float[Tensor, " both"] | None,
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
) -> tuple[Float[Tensor, "batch n both"], Float[Tensor, "heads batch p columns"], Float[Tensor, "batch rows d"]]:
    """Queries and keys Wx + b, projection weights f(X)ᵀ[We, Wr], and f(X) itself.

    One step of autograd: tokens are taken again in backward, so that f(X) is not kept, and their gradient is added to
    that of x where they stand, instead of a second gradient as large as x.
    """
    qk, weights, sample = _Project.apply(x, weight, bias, place, directions, used)  # type: ignore[no-untyped-call]
    return qk, weights, sample


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor, directions: Tensor, used: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, place, directions, used)
        ctx.biased = bias is not None
        sample = take(x, place)
        return linear(x, weight, bias), combine(_heads(sample, directions), directions, used), sample

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_qk: Tensor | None, grad_weights: Tensor | None, grad_sample: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, place, directions, used = ctx.saved_tensors
        grad_x = torch.zeros_like(x) if grad_qk is None else grad_qk @ weight
        grad_weight = grad_bias = grad_directions = None
        if grad_qk is not None:
            flat = grad_qk.flatten(0, 1)
            grad_weight = flat.mT @ x.flatten(0, 1)
            grad_bias = flat.sum(0) if ctx.biased else None
        at_sample = grad_sample
        if grad_weights is not None:
            heads, batch, p, _ = grad_weights.shape
            both = grad_weights.shape[-1]
            flat_weights = _aligned(grad_weights.reshape(heads, batch * p, both))
            sample = take(x, place) if used is None else take(x, place) * used.unsqueeze(-1)
            table = torch.bmm(_flat(_heads(sample, directions)), flat_weights)[..., :both]
            grad_directions = table.unflatten(-1, (2, -1)).permute(2, 0, 1, 3)
            own = torch.bmm(_aligned(beside(directions)), flat_weights.mT)  # (heads, rows, batch·p)
            own = own.unflatten(2, (batch, p)).permute(2, 1, 0, 3).flatten(2)
            own = own if used is None else own * used.unsqueeze(-1)
            at_sample = own if grad_sample is None else own + grad_sample
        if at_sample is not None:
            _add(grad_x, place, at_sample, used)
        return grad_x, grad_weight, grad_bias, None, grad_directions, None


def _add(x: Tensor, place: Tensor, more: Tensor, used: Tensor | None) -> None:
    """x[place] += more, in place. Places differ, but for those that are not used."""
    if place.ndim == 1:
        x.index_copy_(1, place, x[:, place] + more)  # no atomic sums
        return
    assert used is not None
    index = place.unsqueeze(-1).expand_as(more)
    x.scatter_add_(1, index, more * used.unsqueeze(-1))


def _heads(sample: Tensor, directions: Tensor) -> Tensor:
    return sample.unflatten(-1, (directions.shape[1], -1))
