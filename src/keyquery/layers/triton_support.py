"""Helpers of all Triton kernels: compilation, launches, and where they cannot run."""

from __future__ import annotations

import inspect
import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

TRITON = find_spec("triton") is not None
KEPT = 1024  # compiled kernels that are found without Triton's lookup
Constants = tuple[tuple[str, Any], ...]  # compile-time constants, the last parameters of a kernel, and launch options
_COMPILED: dict[Any, tuple[Any, ...]] = {}


def kernel(function: Any) -> Any:
    """triton.jit of the unwrapped function: shape checks in tests wrap it, and Triton needs its source."""
    import triton  # on use only

    return triton.jit(inspect.unwrap(function))


def launch(
    function: Any, grid: tuple[int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...], constants: Constants
) -> None:
    """Start a kernel: `function[grid](*tensors, *numbers, **constants)`, without Triton's lookup, which takes longer.

    Compiled kernels are kept by all that Triton specialises them on: numbers, dtypes and alignments of tensors, and
    the device.
    """
    if not tensors[0].is_cuda:  # the interpreter
        function[grid](*tensors, *numbers, **_language(constants))
        return
    device = torch.cuda.current_device()
    addresses = [t.data_ptr() for t in tensors]
    facts = (*[t.dtype for t in tensors], *[address & 15 for address in addresses])
    key = (id(function), device, constants, numbers, facts)  # the function itself is slow to hash
    kept = _COMPILED.get(key)
    if kept is None:
        values = _language(constants)
        compiled = function[grid](*tensors, *numbers, **values)
        if len(_COMPILED) >= KEPT:
            _COMPILED.clear()
        last = tuple(map(values.__getitem__, function.arg_names[len(tensors) + len(numbers) :]))
        _COMPILED[key] = compiled.run, compiled.function, compiled.packed_metadata, last
        return
    run, handle, metadata, last = kept
    stream = torch._C._cuda_getCurrentRawStream(device)
    # Addresses, since Triton asks the driver about every tensor.
    run(*grid, 1, stream, handle, metadata, None, None, None, *addresses, *numbers, *last)


def _language(constants: Constants) -> dict[str, Any]:
    """Constants by name, with Triton's dtypes, which are slow to hash."""
    import triton.language as tl  # on use only

    names = {name: str(value).removeprefix("torch.") for name, value in constants if isinstance(value, torch.dtype)}
    return {name: getattr(tl, names[name]) if name in names else value for name, value in constants}


def blocks(count: int, size: int) -> int:
    """How many blocks cover `count`. Triton's own helpers work inside kernels too, and take longer than a launch."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def no_kernels(tensor: Tensor) -> str | None:
    """Why Triton kernels cannot run on the device of a tensor; None if they can."""
    if not TRITON:
        return "needs triton: pip install 'keyquery[triton]'"
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA GPU, or TRITON_INTERPRET=1 from the start, not a tensor on {tensor.device.type}"
    return None
