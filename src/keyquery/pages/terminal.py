"""A Reading as tables in the terminal."""

from __future__ import annotations

from rich.console import Console

from keyquery.kinds import show_of
from keyquery.reading import Reading
from keyquery.support.printable import TEXT, printable_copy


def plain_console() -> Console:
    """A console that does not interpret markup or emoji names."""
    return Console(markup=False, emoji=False)


def show(reading: Reading, console: Console) -> None:
    """Print a reading with the display of its kind, or its records; what its strings hold is neutralised."""
    lines, shown = getattr(show_of(reading), "lines", None), printable_copy(reading, TEXT)
    for line in lines(shown) if lines else shown.records():
        console.print(line, markup=False, emoji=False)
