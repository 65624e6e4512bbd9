"""Checks of what a user hands in: each error names the argument, what was given and what was expected."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor


def check_float(name: str, value: Any, shape: str, **sizes: int) -> None:
    """Require a finite floating-point tensor of a shape such as "... r d" or "n d", where some sizes are known.

    >>> check_float("mean", torch.zeros(3), "... d", d=4)
    Traceback (most recent call last):
    ValueError: mean must have shape (..., d) with d = 4, got (3,)
    """
    known = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
    expected = f"({', '.join(shape.split())})" + (f" with {known}" if known else "")
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {expected}, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got dtype {value.dtype}")
    axes = [axis for axis in shape.split() if axis != "..."]
    right = value.ndim >= len(axes) if "..." in shape else value.ndim == len(axes)
    if not right or any(sizes.get(a, n) != n for a, n in zip(axes[::-1], value.shape[::-1], strict=False)):
        raise ValueError(f"{name} must have shape {expected}, got {tuple(value.shape)}")
    if value.numel() == 0:
        raise ValueError(f"{name} must not be empty: expected {expected}, got {tuple(value.shape)}")
    # A finite sum has finite terms: one pass, and no mask as large as the tensor unless something is wrong.
    if not value.is_meta and not value.sum().isfinite():
        bad = int((~torch.isfinite(value)).sum())
        if bad == 0:
            return
        raise ValueError(f"{name} must be finite, got {bad} NaN or infinite of {value.numel()} values")


def check_count(name: str, value: Any, least: int = 1, most: int | None = None, optional: bool = False) -> None:
    """Require an integer in [least, most], or None if `optional`."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Require one of a few names; a near miss is told which it resembles."""
    if value not in choices:
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}")
