"""Safe reading of NumPy files: arrays of numbers and strings only, no code is executed."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keyquery.support.files import MIB, decompressed_limit, regular

ARRAYS = 128 * MIB  # decompressed size that any file of arrays may have: arrays create no Python objects
NUMBERS = "biufcSU"  # dtype kinds that are read: numbers and strings


def read_arrays(path: str | Path, *names: str) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz file; with `names`, only those of them that exist.

    No code in it is executed, and sizes in its headers are checked before memory is allocated.
    """
    path = regular(path)
    try:
        with zipfile.ZipFile(path) as file:
            members = {info.filename.removesuffix(".npy"): info for info in file.infolist()}
            chosen = {name: info for name, info in members.items() if not names or name in names}
            most = decompressed_limit(path.stat().st_size, ARRAYS)
            if sum(info.file_size for info in chosen.values()) > most:
                raise ValueError(f"it decompresses to more than the limit of {most} bytes")
            return {name: _array(name, partial(file.open, info), info.file_size) for name, info in chosen.items()}
    except OSError:
        raise
    except Exception as error:  # zipfile and NumPy raise errors of many types for a broken file
        raise ValueError(f"{path} is not a readable .npz file: {str(error) or type(error).__name__}") from None


def read_array(path: str | Path) -> np.ndarray:
    """Read the array of an .npy file, checked in the same way."""
    path = regular(path)
    try:
        return _array("it", partial(path.open, "rb"), path.stat().st_size)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a readable .npy file: {str(error) or type(error).__name__}") from None


def _array(name: str, opened: Callable[[], Any], size: int) -> np.ndarray:
    form = np.lib.format
    with opened() as file:
        version = form.read_magic(file)
        header = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, _, dtype = header(file)
    if dtype.hasobject:
        raise ValueError(f"{name} holds objects, which could execute code: refused")
    if dtype.kind not in NUMBERS:
        raise ValueError(f"{name} has dtype {dtype}; only numbers and strings are read")
    if math.prod(shape) * max(dtype.itemsize, 1) > size:
        raise ValueError(f"{name} declares shape {shape} of {dtype}, more than its {size} bytes hold")
    with opened() as file:
        array = form.read_array(file, allow_pickle=False)
    if dtype.kind == "U" and array.size and dtype.itemsize and np.ascontiguousarray(array).view("u4").max() > 0x10FFFF:
        raise ValueError(f"{name} holds invalid Unicode")  # which would raise later, on access
    return array
