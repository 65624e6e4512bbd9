"""Draws dial.svg and dial_layers.svg: what is lost when a part of the scores is turned off, and in which layers."""

from __future__ import annotations

from pathlib import Path

import keyquery as kq
from keyquery.report import picture_bytes


def main() -> None:
    """Read the study's figures and write the pictures beside this file."""
    here = Path(__file__).parent
    reading = kq.Reading.load(here.parent / "studies" / "dial.json")
    for what, name in (("parts", "dial.svg"), ("layers", "dial_layers.svg")):
        (here / name).write_bytes(picture_bytes(here / name, reading, what=what))


if __name__ == "__main__":
    main()
