"""Draws flow.svg: flow between two sentences in the encoder that ships, layers by heads."""

from __future__ import annotations

from pathlib import Path

import keyquery as kq
from keyquery.pages import picture_bytes

TEXTS = ["The captain of the old ship was very young.", "He looked at the sea and said nothing to her."]


def main() -> None:
    """Write the picture beside this file."""
    path = Path(__file__).with_suffix(".svg")
    path.write_bytes(picture_bytes(path, kq.flow(kq.models.ENCODER, text=TEXTS)))


if __name__ == "__main__":
    main()
