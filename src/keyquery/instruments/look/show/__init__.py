"""A look in the terminal, as a figure and as a page."""

from typing import Any

from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.figure import FIGURES, svg
from keyquery.instruments.look.show.page import page

__all__ = ["FIGURES", "lines", "page", "svg"]


def lines(reading: Look) -> list[Any]:
    """The look as tables in the terminal."""
    from keyquery.instruments.look.show.terminal import look_lines  # which needs rich, as pages do not

    return look_lines(reading)
