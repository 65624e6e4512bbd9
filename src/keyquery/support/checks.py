"""Argument checks: each error names the argument, the value that was given and what was expected."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyquery.support.printable import MESSAGE, WORD, printable


def check_float(name: str, value: Any, shape: str, **sizes: int) -> None:
    """Require a finite floating-point tensor of a shape such as "... r d" or "n d", with some sizes given."""
    known = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
    listed = ", ".join(shape.split()) + ("" if " " in shape else ",")
    expected = f"({listed})" + (f" with {known}" if known else "")
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {expected}, got {type(value).__name__}")
    check_dtype(name, value.dtype)
    axes = [axis for axis in shape.split() if axis != "..."]
    right = value.ndim >= len(axes) if "..." in shape else value.ndim == len(axes)
    if not right or any(sizes.get(a, n) != n for a, n in zip(axes[::-1], value.shape[::-1], strict=False)):
        raise ValueError(f"{name} must have shape {expected}, got {tuple(value.shape)}")
    if value.numel() == 0:
        raise ValueError(f"{name} must not be empty: expected {expected}, got {tuple(value.shape)}")
    if bad := _not_finite(name, value):
        raise ValueError(f"{name} must be finite, got {bad} NaN or infinite of {value.numel()} values")


def environment_count(name: str, default: int) -> int:
    """A count from an environment variable, such as RANK or WORLD_SIZE, which torchrun sets."""
    value = os.environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ValueError(f"the environment variable {name} must be a number, as set by torchrun, got {value!r}")
    return int(value)


def check_range(name: str, *tensors: Tensor) -> None:
    """Require results to be within the range of their dtype."""
    for tensor in tensors:
        if _not_finite(name, tensor):
            limit, dtype = torch.finfo(tensor.dtype).max, str(tensor.dtype).removeprefix("torch.")
            raise OverflowError(f"{name} is beyond the range of {dtype}, ±{limit:.2g}: convert to a wider dtype first")


def _not_finite(name: str, value: Tensor) -> int:
    """The number of values that are NaN or infinite."""
    if value.is_meta:
        return 0
    try:
        # A finite sum has finite terms: one pass, and no mask of the tensor's size unless something is wrong.
        return 0 if bool(value.sum().isfinite()) else int((~torch.isfinite(value)).sum())
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise RuntimeError(f"{name} is batched by vmap, which Form does not support: use leading dimensions") from None


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Require a floating-point dtype of at least 16 bits."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"{name} must be a floating-point tensor of at least 16 bits, got dtype {dtype}")


def broadcast(*shapes: torch.Size) -> torch.Size:
    """The shape that shapes broadcast to; unlike torch's own function, it does not import SymPy."""
    return torch.Size(np.broadcast_shapes(*shapes))


def check_batches(**shapes: torch.Size) -> torch.Size:
    """Require leading dimensions that broadcast, and return the shape that they broadcast to."""
    try:
        return broadcast(*shapes.values())
    except ValueError:
        listed = " and ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"leading dimensions must broadcast, got {listed}") from None


def check_number(name: str, value: Any) -> None:
    """Require a finite real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_count(name: str, value: Any, least: int = 1, most: int | None = None, optional: bool = False) -> None:
    """Require an integer in [least, most], or None if `optional`."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if most is not None and most < least:
        raise ValueError(f"{name} is {value}, but there is nothing to choose from")
    if int(value) < least or (most is not None and int(value) > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def checked_integers(name: str, values: Any, least: int = 0) -> tuple[int, ...]:
    """Several integers, each at least `least`, as a tuple."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    integers = tuple(values)
    for value in integers:
        check_count(name, value, least)
    return tuple(map(int, integers))


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Require one of the given names; the error suggests the closest one."""
    if value not in choices:
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {printable(repr(near[0]), WORD)}?" if near else ""
        listed = printable(", ".join(map(repr, choices)), MESSAGE)  # those of a file may be many, and long
        raise ValueError(f"{name} must be one of {listed}, got {printable(repr(value), WORD)}{hint}")
