"""Derivatives that torch would get wrong are refused: of second order through a fixed basis, and NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


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

    def check(grad: Tensor | None) -> None:
        if grad is not None and not grad.isfinite().all():
            raise RuntimeError(f"{subject} have no derivatives where values are equal or factors dependent")

    if torch.is_grad_enabled() and tensor.requires_grad:
        tensor = tensor.view_as(tensor)
        tensor.register_hook(check)
    return tensor


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Refuse.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _Refuse(torch.autograd.Function):
    """The identity on a derivative, as a function of the point it is taken at: differentiating it again is detected."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, tensor: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("a form of dependent factors (tied, repeated or zero rows) has no second derivatives here")
