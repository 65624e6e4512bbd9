"""Draws triangle.svg: the heads of the two models that ship, on the long text that ships."""

from __future__ import annotations

from pathlib import Path

import keyquery as kq
from keyquery.instruments.look.show.triangle import svg


def main() -> None:
    """Look at both and write the picture beside this file."""
    names = {kq.models.ENCODER: "encoder: find the masked word", kq.models.DECODER: "decoder: predict the next word"}
    looks = [kq.look(m, text=kq.models.LONG_TEXT, name=name) for m, name in names.items()]
    Path(__file__).with_name("triangle.svg").write_text(svg(kq.compare(*looks)), encoding="utf-8")


if __name__ == "__main__":
    main()
