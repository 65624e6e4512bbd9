"""JSON parsing with limits: nesting and containers are counted in the text before any object is built."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import UInt8

DEEPEST = 100  # levels of lists and objects
CONTAINERS, LETTERS = 100_000, 8  # limit on lists and objects: CONTAINERS, plus one per LETTERS characters of the text
CHUNK = 2**20  # characters that are counted at a time
# String literals, including an unterminated one, so that none is scanned twice.
TEXTS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

DIGITS = 100  # in a row: with an exponent of two digits still far within the range of a float


def parse_json(text: str, finite: bool = False) -> Any:
    """Parse a JSON text; with `finite`, NaN, infinities and numbers too large for a float are refused."""
    bare = TEXTS.sub("", text).encode("utf-8", "surrogatepass")
    _check_brackets(bare, CONTAINERS + len(text) // LETTERS)
    try:
        if not finite:
            return json.loads(text)
        # Numbers are checked one by one only where any can be too large: json's own float is several times faster.
        return json.loads(text, parse_constant=_refuse, parse_float=_finite if _any_large(bare) else None)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from None


def _check_brackets(bare: bytes, most: int) -> None:
    """Check the number and nesting of brackets in a JSON text without its strings."""
    depth = opened = 0
    for signs in _chunks(bare):
        signs = signs | 0x20  # maps [ to { and ] to }
        steps = (signs == ord("{")).astype(np.int32) - (signs == ord("}"))
        depths = depth + np.cumsum(steps)
        depth, opened = int(depths[-1]), opened + int((steps > 0).sum())
        if depths.max() > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        if opened > most:
            raise ValueError(f"it holds more than {most} lists and objects")


def _any_large(bare: bytes) -> bool:
    """Whether a JSON text without its strings may hold a number beyond the range of a float."""
    if b"E" in bare or bare.count(b"e") != sum(map(bare.count, (b"e-", b"true", b"false"))):
        return True  # an exponent that is not negative
    for signs in _chunks(bare):
        others = np.flatnonzero((signs < ord("0")) | (signs > ord("9")))
        if np.diff(others, prepend=-1, append=len(signs)).max() > DIGITS:
            return True
    return False


def _chunks(bare: bytes) -> Iterator[UInt8[np.ndarray, " letters"]]:
    """A text in parts that fit the cache."""
    return (np.frombuffer(bare, np.uint8, min(CHUNK, len(bare) - start), start) for start in range(0, len(bare), CHUNK))


def _refuse(name: str) -> float:
    raise ValueError(f"it holds {name}, which is not valid JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits:.40} is too large")
    return number
