"""A Reading as a matplotlib figure, or as an image file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from keyquery.kinds import show_of
from keyquery.pages.colours import LIGHT
from keyquery.reading import Reading
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.printable import printable_copy

KINDS = (".pdf", ".png", ".svg")
# Sized for a column of a paper: small type, thin lines, and text that stays text in a PDF.
PAPER: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
    "text.parse_math": False,  # a dollar sign in a name is not math
}
PAPER |= {"svg.hashsalt": "keyquery"}  # reproducible files
SIGNED = LIGHT["skew"], LIGHT["symmetric"]  # colours of what is below and above 0


def plot(reading: Reading, what: str | None = None, **options: Any) -> Any:
    """A matplotlib figure of a reading, `what` by name, with the figure's options. Default: the first of its kind.

    Looks and comparisons have "triangle", their default on data, and "map", the symmetry of each head.
    """
    figures = getattr(show_of(reading), "FIGURES", {})
    if not figures:
        raise ValueError(f"a reading of kind {reading.kind!r} has no figure")
    pyplot = optional("matplotlib.pyplot", "plot")
    what = what or next(iter(figures))
    check_choice("what", what, tuple(figures))
    with _paper(pyplot):
        return figures[what](printable_copy(reading), pyplot, **options)


@contextmanager
def _paper(pyplot: Any) -> Iterator[None]:
    """Apply the PAPER settings to one figure.

    In a notebook, the first figure loads the backend, which turns on interactive mode; without it, later figures are
    not shown. So interactive mode is kept when the settings are restored.
    """
    with pyplot.rc_context(PAPER):
        try:
            yield
        finally:
            interactive = pyplot.isinteractive()
    optional("matplotlib", "plot").interactive(interactive)


def signed_map(
    axis: Any, values: Any, most: float | None = None, below: str = SIGNED[0], above: str = SIGNED[1], **bar: Any
) -> None:
    """Draw values on a scale of two colours about 0, up to the largest magnitude, and a bar beside it."""
    colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("", [below, "#f2f4f6", above])
    most = most or float(np.nanmax(np.abs(values))) or 1.0
    image = axis.imshow(values, vmin=-most, vmax=most, cmap=colours, aspect="auto", interpolation="nearest")
    drawn = axis.figure.colorbar(image, ax=axis, **bar)
    drawn.set_ticks([-most, 0, most], labels=[f"−{most:.2g}", "0", f"+{most:.2g}"])


def check_picture(path: Path) -> None:
    """Refuse a path with an extension that is not supported for figures."""
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"{path}: a figure must be a {', '.join(KINDS[:-1])} or {KINDS[-1]} file")


def picture_bytes(path: Path, reading: Reading, what: str | None = None, **options: Any) -> bytes:
    """A reading's figure as the content of an image file, whose extension selects the format: .svg, .png or .pdf.

    The triangle and causal graphs as .svg need no other package; all else is drawn with matplotlib. `what` and
    `options` are those of `plot`, but a look has the triangle also without data.
    """
    check_picture(path)
    show = show_of(reading)
    if path.suffix.lower() == ".svg" and (drawn := getattr(show, "svg", None)):
        # Control characters are not well-formed XML.
        return str(drawn(printable_copy(reading), **options)).encode()
    if what is None and "triangle" in getattr(show, "FIGURES", {}):
        what = "triangle"  # also without data
    figure = plot(reading, what, **options)
    data = io.BytesIO()
    with optional("matplotlib", "plot").rc_context(PAPER):
        kind = path.suffix.lower()[1:]
        figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else None)
    optional("matplotlib.pyplot", "plot").close(figure)
    return data.getvalue()
