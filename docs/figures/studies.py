"""Draws the pictures of all studies from their figures."""

from __future__ import annotations

from pathlib import Path

import keyquery as kq
from keyquery.pages import picture_bytes

HERE = Path(__file__).parent
# File, the study it is of, and which of its pictures.
PICTURES = (
    ("objectives.svg", "objectives", None),
    ("mask.svg", "mask", None),
    ("kernels.svg", "kernels", None),
    ("initialisation.svg", "initialisation", None),
)


def main() -> None:
    """Read each study's figures and write its pictures beside this file."""
    for name, study, what in PICTURES:
        reading = kq.Reading.load(HERE.parent / "studies" / f"{study}.json")
        (HERE / name).write_bytes(picture_bytes(HERE / name, reading, what=what))


if __name__ == "__main__":
    main()
