"""A look in the terminal, as a figure and as a page."""

from typing import Any

from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.figure import FIGURES as FIGURES
from keyquery.instruments.look.show.figure import svg as svg
from keyquery.instruments.look.show.page import page as page


def lines(reading: Look) -> list[Any]:
    """The look as tables in the terminal."""
    from keyquery.instruments.look.show.terminal import look_lines  # which needs rich, as pages do not

    return look_lines(reading)
