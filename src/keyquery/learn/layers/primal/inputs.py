"""Validation of the inputs of a primal layer, and the dtype it computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def check_tokens(x: Tensor, mask: Tensor | None, dim: int, dtype: torch.dtype) -> None:
    """Require tokens (batch, n, dim) in the layer's dtype, or one that autocast converts, and a mask (batch, n)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dtype != dtype and (dtype == torch.float64 or not has_autocast(x)):
        raise TypeError(f"x must be {dtype}, as the layer is, got {x.dtype}")
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"x must be (batch, n, {dim}), got {tuple(x.shape)}")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        mask_dtype = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"mask must be bool, True for real tokens, got {mask_dtype}")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be {tuple(x.shape[:2])}, got {tuple(mask.shape)}")


def has_autocast(x: Tensor) -> bool:
    """Whether autocast applies to x; there is none on the meta device."""
    return x.dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on the device of x."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def clean(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x with padding set to 0, and the mask of real tokens."""
    return (x, None) if mask is None else (x.where(mask.unsqueeze(-1), 0.0), mask)


def count(x: Tensor, real: Tensor | None) -> Tensor | int:
    """Number of tokens per sample; an int if there is no padding."""
    return x.shape[1] if real is None else real.sum(1).to(torch.promote_types(x.dtype, torch.float32))


def untouched(part: nn.Module) -> bool:
    """Whether a projection is a plain Linear: a replaced or hooked one must be called."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return type(part) is nn.Linear and not any(hooks) and "forward" not in part.__dict__


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Tensors in the dtype of autocast, if it is on."""
    dtype = working_dtype(tensors[0])
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x: that of autocast, if it is on."""
    return torch.get_autocast_dtype(x.device.type) if has_autocast(x) else x.dtype
