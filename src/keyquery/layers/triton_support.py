"""Helpers of all Triton kernels: compilation, and where they cannot run."""

from __future__ import annotations

import inspect
import os
from importlib.util import find_spec
from typing import Any

from torch import Tensor

TRITON = find_spec("triton") is not None


def kernel(function: Any) -> Any:
    """triton.jit of the unwrapped function: shape checks in tests wrap it, and Triton needs its source."""
    import triton  # on use only

    return triton.jit(inspect.unwrap(function))


def blocks(count: int, size: int) -> int:
    """How many blocks cover `count`. Triton's own helpers work inside kernels too, and take longer than a launch."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The next power of two.

    >>> [power_of_two(count) for count in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << (count - 1).bit_length()


def no_kernels(tensor: Tensor) -> str | None:
    """Why Triton kernels cannot run on the device of a tensor; None if they can."""
    if not TRITON:
        return "needs triton: pip install 'keyquery[triton]'"
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA GPU, or TRITON_INTERPRET=1 from the start, not a tensor on {tensor.device.type}"
    return None
