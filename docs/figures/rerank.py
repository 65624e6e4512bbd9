"""Draws rerank.svg: what neighbours both ways do to a list of digits, of the query that gains most."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import keyquery as kq
from keyquery.pages import picture_bytes


def main() -> None:
    """Re-rank a hundred lists, and draw one."""
    digits = load_digits()
    vectors, labels = digits.data, digits.target
    images = np.rint(digits.images[100:] * 255 / 16).astype(np.uint8)
    names = [f"a {label}" for label in labels]
    shown = {"names": names[100:], "query_names": names[:100], "relevant": labels[:100, None] == labels[100:]}
    model = kq.KReciprocalReranker(top=256, device="cpu")
    reading = model.moves(vectors[:100], vectors[100:], images=images, most=8, **shown)
    gains = [one["precision"]["after"] - one["precision"]["before"] for one in reading.queries]
    path = Path(__file__).with_suffix(".svg")
    path.write_bytes(picture_bytes(path, reading, query=int(np.argmax(gains))))
    print(f"{path}: mean gain {np.mean(gains):+.3f} mAP, the most {max(gains):+.3f}")


if __name__ == "__main__":
    main()
