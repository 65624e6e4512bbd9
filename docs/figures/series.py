"""Draws series.svg: a classifier that has learned bumps and dips, and what it looks at."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import keyquery as kq
from keyquery import pages


def made(count: int, seed: int, length: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Three dims of noise; the second has a bump or a dip at some place, the first a wave that means nothing."""
    rng, dips = np.random.default_rng(seed), np.arange(count) % 2
    values = rng.normal(size=(count, length, 3)) * 0.3
    for one, dip in zip(values, dips, strict=True):
        one[:, 0] += np.sin(np.arange(length) / 9 + 6 * rng.random())
        at = rng.integers(15, 90)
        one[at : at + 12, 1] += (1 - 2 * dip) * 3 * np.hanning(12)
    return values, np.array(["bump", "dip"])[dips]


def main() -> None:
    """Fit, leave stretches of a new series out, and write the picture beside this file."""
    X, y = made(160, seed=0)
    model = kq.SeriesClassifier(width=32, heads=2, lr=2e-3, random_state=0, device="cpu").fit(X, y)
    path = Path(__file__).with_name("series.svg")
    path.write_bytes(pages.picture_bytes(path, model.importance(made(1, seed=1)[0])))


if __name__ == "__main__":
    main()
