"""What a primal layer is called with: which x and mask it takes, and in which dtype it computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def check_tokens(x: Tensor, mask: Tensor | None, dim: int, dtype: torch.dtype) -> None:
    """Require tokens (batch, n, dim) in the layer's dtype, or one that autocast converts, and a mask (batch, n).

    >>> check_tokens(torch.zeros(1, 5, 8).double(), None, 8, torch.float32)
    Traceback (most recent call last):
    TypeError: x must be torch.float32, as the layer is, got torch.float64
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dtype != dtype and (dtype == torch.float64 or not has_autocast(x)):
        raise TypeError(f"x must be {dtype}, as the layer is, got {x.dtype}")
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"x must be (batch, n, {dim}), got {tuple(x.shape)}")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"mask must be bool, True for real tokens, got {given}")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be {tuple(x.shape[:2])}, got {tuple(mask.shape)}")


def has_autocast(x: Tensor) -> bool:
    """Whether autocast chooses the dtype that x is multiplied in; the meta device knows of none."""
    return x.dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Where tensors like x keep their dtype."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
