"""Compact encoding of numbers for a page."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


def pack(values: Any) -> str:
    """Encode numbers with three significant digits in 16 bits each, as base64.

    The code is 0 for zero, 65535 for NaN, else 1 + 900·(exponent + 18) + (digits − 100), with the sign in the highest
    bit; decoding gives exactly the number rounded to three digits, however large or small.
    """
    array = np.asarray(values, dtype=np.float64).ravel()
    none = np.isnan(array)
    size = np.where(none, 0.0, np.abs(array))
    zero = size < 1e-18
    exponent = np.floor(np.log10(np.where(zero, 1.0, size))).astype(int)
    digits = np.rint(np.where(zero, 1.0, size) / 10.0 ** (exponent - 2)).astype(int)
    exponent, digits = np.where(digits == 1000, exponent + 1, exponent), np.where(digits == 1000, 100, digits)
    code = np.where(zero, 0, 1 + 900 * (exponent + 18) + digits - 100) | np.where(array < 0, 1 << 15, 0)
    code = np.where(none, 65535, code)
    return base64.b64encode(code.astype("<u2").tobytes()).decode()


def pack_bytes(values: Any) -> tuple[float, str]:
    """Quantise numbers to 8 bits: the step, 1/127 of the largest magnitude, and one byte per number as base64."""
    array = np.asarray(values, dtype=np.float64).ravel()
    step = float(f"{np.abs(array).max() / 127:.4g}") or 1.0
    counts = np.clip(np.rint(array / step), -127, 127)
    return step, base64.b64encode(counts.astype("<i1").tobytes()).decode()
