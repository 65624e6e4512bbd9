"""A Reading as a matplotlib figure, or as a picture file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyquery.reading import Reading
from keyquery.report.registry import display_of, imported
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.printable import printable_copy

KINDS = (".pdf", ".png", ".svg")
# Fit for a column of a paper: small type, thin lines, and letters that stay letters in a PDF.
PAPER: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
    "text.parse_math": False,  # a dollar in a name is a dollar
}
PAPER |= {"svg.hashsalt": "keyquery"}  # the same figures give the same file


def plot(reading: Reading, what: str | None = None, **options: Any) -> Any:
    """A figure of a reading, by its name among those of its kind. Default: the first.

    Looks and comparisons have "triangle", their default on data, and "map", the symmetry of each head.
    """
    figures = display_of(reading).figures
    if not figures:
        raise ValueError(f"a reading of kind {reading.kind!r} has no picture")
    pyplot = optional("matplotlib.pyplot", "plot")
    what = what or next(iter(figures))
    check_choice("what", what, tuple(figures))
    with _paper(pyplot):
        return imported(figures[what])(printable_copy(reading), pyplot, **options)


@contextmanager
def _paper(pyplot: Any) -> Iterator[None]:
    """The settings of print, for one figure.

    A notebook's backend comes with the first figure and turns interaction on, without which no later figure is shown:
    that is not to be undone with the settings.
    """
    with pyplot.rc_context(PAPER):
        try:
            yield
        finally:
            interactive = pyplot.isinteractive()
    optional("matplotlib", "plot").interactive(interactive)


def check_picture(path: Path) -> None:
    """Refuse a name whose ending is no kind of picture.

    >>> check_picture(Path("heads.gif"))
    Traceback (most recent call last):
    ValueError: heads.gif: a picture is .pdf, .png or .svg
    """
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"{path}: a picture is {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def picture_bytes(path: Path, reading: Reading, joined: bool = False, what: str | None = None, **options: Any) -> bytes:
    """The triangle, or the kind's own picture with its `options`, as `path` names it: .svg, .png or .pdf.

    The triangle and causal graphs as .svg need no other package; the rest is drawn by matplotlib.
    """
    check_picture(path)
    display = display_of(reading)
    options |= {"joined": True} if joined else {}
    if path.suffix.lower() == ".svg" and display.svg:
        # No control character is well-formed XML.
        return str(imported(display.svg)(printable_copy(reading), **options)).encode()
    if what is None and "triangle" in display.figures:
        what = "triangle"  # a picture file of a look is its triangle, also without data
    figure = plot(reading, what, **options)
    data = io.BytesIO()
    with optional("matplotlib", "plot").rc_context(PAPER):
        kind = path.suffix.lower()[1:]
        figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else None)
    optional("matplotlib.pyplot", "plot").close(figure)
    return data.getvalue()
