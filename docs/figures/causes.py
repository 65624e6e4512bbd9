"""Draws causes.svg: the graph of a model whose causes are known, with one of them hidden."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import keyquery as kq
from keyquery import pages

# Each word and what it depends on; the weather is hidden.
CAUSES = {
    "weather": {},
    "season": {},
    "sea": {},
    "sprinkler": {},
    "rain": {"weather": 0.8, "season": 0.6},
    "wind": {"weather": 0.7, "sea": 0.6},
    "grass": {"rain": 0.7, "sprinkler": 0.6},
    "shoes": {"grass": 0.8},
    "waves": {"wind": 0.8},
    "fog": {},
    "lamps": {"fog": 0.7},
}


def attention() -> np.ndarray:
    """(I − G)⁻¹ with rows that sum to 1."""
    words = list(CAUSES)
    weights = np.array([[of.get(word, 0.0) for word in words] for of in CAUSES.values()])
    solved = np.linalg.inv(np.eye(len(words)) - weights)
    return solved / solved.sum(1, keepdims=True)


def main() -> None:
    """Search the graph of what is seen, and write the picture beside this file."""
    words = list(CAUSES)
    options = {"samples": 1e10, "alpha": 1e-3}  # so many that no test errs
    options |= {"tokens": words, "name": "ten words, the weather hidden"}
    reading = kq.causes(attention(), range(1, len(words)), **options)
    path = Path(__file__).with_suffix(".svg")
    path.write_bytes(pages.picture_bytes(path, reading))


if __name__ == "__main__":
    main()
