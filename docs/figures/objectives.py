"""Draws objectives.svg: what heads are made of while the models of the study learn."""

from __future__ import annotations

from pathlib import Path

import keyquery as kq
from keyquery.report import picture_bytes


def main() -> None:
    """Read the study's figures and write the picture beside this file."""
    here = Path(__file__).parent
    reading = kq.Reading.load(here.parent / "studies" / "objectives.json")
    path = here / "objectives.svg"
    path.write_bytes(picture_bytes(path, reading))


if __name__ == "__main__":
    main()
