"""Draws kernels.svg: how every kernel does on tasks of known truth and in language models."""

from __future__ import annotations

from pathlib import Path

import keyquery as kq
from keyquery.report import picture_bytes


def main() -> None:
    """Read the study's figures and write the picture beside this file."""
    here = Path(__file__).parent
    reading = kq.Reading.load(here.parent / "studies" / "kernels.json")
    path = here / "kernels.svg"
    path.write_bytes(picture_bytes(path, reading))


if __name__ == "__main__":
    main()
