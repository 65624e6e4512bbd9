"""Curves of a training as short text: float32 numbers of 12 significant bits, compressed."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

KEPT = np.uint32(0xFFFFF000)  # bits: sign, exponent and 11 of the mantissa's 23


def packed(values: Any) -> dict[str, Any]:
    """An array as plain data; a number changes by at most 1 in 4,096, NaN and infinities stay."""
    array = np.ascontiguousarray(values, dtype=np.float32)
    bits = array.view(np.uint32)
    rounded = np.where(np.isfinite(array), (bits + np.uint32(0x800)) & KEPT, bits)
    columns = rounded.reshape(-1).view(np.uint8).reshape(-1, 4).T.copy()  # bytes of one rank together: they repeat
    data = zlib.compress(columns.tobytes(), 9)
    return {"shape": list(array.shape), "data": base64.b64encode(data).decode()}


def unpacked(curve: dict[str, Any]) -> np.ndarray:
    """The array of `packed`, in float64."""
    columns = np.frombuffer(zlib.decompress(base64.b64decode(curve["data"])), np.uint8).reshape(4, -1)
    return columns.T.copy().reshape(-1).view(np.float32).reshape(curve["shape"]).astype(float)
