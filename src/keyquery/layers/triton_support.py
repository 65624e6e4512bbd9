"""What all Triton kernels of the house share: how they are made, and where they cannot run."""

from __future__ import annotations

import inspect
import os
from importlib.util import find_spec
from typing import Any

from torch import Tensor

TRITON = find_spec("triton") is not None


def kernel(function: Any) -> Any:
    """triton.jit of the function itself: what checks shapes in tests wraps it, and Triton reads its source."""
    import triton  # on use only

    return triton.jit(inspect.unwrap(function))


def no_kernels(tensor: Tensor) -> str | None:
    """Why Triton kernels cannot run where a tensor is; None where they can."""
    if not TRITON:
        return "needs triton: pip install 'keyquery[triton]'"
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA GPU, or TRITON_INTERPRET=1 from the start, not a tensor on {tensor.device.type}"
    return None
