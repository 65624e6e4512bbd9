"""Draws depth.svg: the plane of depth and width with the law, and GPT-3 beside the shape that the law gives it."""

from __future__ import annotations

from pathlib import Path

import keyquery as kq
from keyquery import pages


def main() -> None:
    """Write the picture beside this file."""
    path = Path(__file__).with_suffix(".svg")
    path.write_bytes(pages.picture_bytes(path, kq.depth(layers=96, width=12288)))


if __name__ == "__main__":
    main()
