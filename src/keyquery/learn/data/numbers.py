"""Parsing of numbers in files."""

from __future__ import annotations


def to_number(text: str) -> float:
    """Parse a number; unlike `float`, 1_0 is not ten."""
    if "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return float(text)
