"""Derivatives where torch's are NaN or wrong: first derivatives are exact, second derivatives raise."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

EQUAL = 1e-12  # eigenvalues that differ by less, relative to the largest, count as equal

REFUSED = (
    "a form of dependent factors (tied, repeated or zero rows) and its projections have no second derivatives here"
)


def first_order(tensor: Tensor) -> Tensor:
    """The identity, with first derivatives only: for values that are exact to first order only."""
    same: Tensor = _Once.apply(tensor)  # type: ignore[no-untyped-call]
    return same


def differentiated(*tensors: Tensor) -> bool:
    """Whether derivatives of any of these are required, backward or forward."""
    backward = torch.is_grad_enabled()
    return any((backward and t.requires_grad) or unpack_dual(t).tangent is not None for t in tensors)


def refuse_nan(tensor: Tensor, subject: str) -> Tensor:
    """The tensor itself; a gradient of it that is NaN or infinite raises."""

    def check(grad: Tensor) -> None:
        if not grad.isfinite().all():
            raise RuntimeError(f"{subject} have no derivatives where values are equal or factors dependent")

    if torch.is_grad_enabled() and tensor.requires_grad:
        tensor = tensor.view_as(tensor)
        tensor.register_hook(check)
    return tensor


def eigenpairs(
    values: Float[Tensor, "*batch n"], vectors: Float[Tensor, "*batch d n"], query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of S as differentiable functions of query and key, given their values.

    dλᵢ = vᵢᵀdS vᵢ and dvᵢ = Σⱼ vⱼ vⱼᵀdS vᵢ/(λᵢ − λⱼ) + (component outside the span)/λᵢ. Rotations among vectors of
    equal λ, which S does not determine, are left out; torch's own derivative is NaN there.
    """
    if not differentiated(query, key):
        return values, vectors
    inner, outside = _change(vectors, query, key)
    weights = _inverse(values.unsqueeze(-1) - values.unsqueeze(-2), values)
    moves = (weights * inner) @ vectors.mT + outside * _inverse(values, values).unsqueeze(-1)
    return values + _slope(inner.diagonal(dim1=-2, dim2=-1)), vectors + _slope(moves.mT)


def root_rows(
    values: Float[Tensor, "*batch n"],
    vectors: Float[Tensor, "*batch d n"],
    kept: Bool[Tensor, "*batch n"],
    query: Tensor,
    key: Tensor,
) -> Float[Tensor, "*batch n d"]:
    """R = |Λ|^½Vᵀ of the eigenpairs that are kept, 0 for others, as a function of query and key by RᵀDR, D = sign Λ.

    With P = RᵀDR, the blocks of dP are dS between kept pairs and λᵢ/(λᵢ − λⱼ)·dS between a kept i and a j that is not:
    there is no division by a difference of kept eigenvalues, so that repeated ones have derivatives as well. Single
    rows of R may rotate among themselves; P is invariant to that.
    """
    size = torch.where(kept, values.abs(), 0.0).sqrt()
    rows = vectors.mT * size.unsqueeze(-1)
    if not differentiated(query, key):
        return rows
    inner, outside = _change(vectors, query, key)
    across = values.unsqueeze(-1) * _inverse(values.unsqueeze(-1) - values.unsqueeze(-2), values)
    moves = torch.where(kept.unsqueeze(-2), 0.5, across) * inner @ vectors.mT + outside
    inverse = torch.where(kept, values.sign() / torch.where(kept, size, 1.0), 0.0)
    return rows + _slope(moves * inverse.unsqueeze(-1))


def _change(vectors: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """VᵀS in coordinates V, and its component outside their span; functions of query and key, with V held fixed."""
    query, key = first_order(query), first_order(key)
    along = ((query @ vectors).mT @ key + (key @ vectors).mT @ query) / 2
    inner = along @ vectors
    return inner, along - inner @ vectors.mT


def _slope(tensor: Tensor) -> Tensor:
    """Zero, with the derivatives of a tensor."""
    return tensor - tensor.detach()


def _inverse(gaps: Tensor, values: Tensor) -> Tensor:
    """1/gap, and 0 where the gap is 0."""
    floor = EQUAL * values.abs().amax(-1)[(..., *[None] * (gaps.ndim - values.ndim + 1))]
    none = gaps.abs() <= floor
    return torch.where(none, 0.0, 1 / torch.where(none, 1.0, gaps))


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Refuse.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _Refuse.apply(tangent, *ctx.saved_tensors).view_as(tangent)  # type: ignore[no-untyped-call]


class _Refuse(torch.autograd.Function):
    """The identity on a derivative, as a function of the point it is taken at: differentiating it again is detected."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, tensor: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(REFUSED)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise RuntimeError(REFUSED)
