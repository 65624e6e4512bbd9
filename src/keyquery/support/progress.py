"""Progress of long computations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from keyquery.support.printable import printable

WIDE = 60  # characters of a description
# (items, description, number of items) → the same items, wrapped to show progress.
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


def silent(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
    """Show no progress.

    >>> list(silent([1, 2], "reading", 2))
    [1, 2]
    """
    return items


def bar(items: Iterable[Any], description: str, total: int) -> Generator[Any, None, None]:
    """Show a bar on stderr in a terminal or notebook, else nothing; a caller that stops early must close it.

    >>> list(bar([1, 2], "reading", 2))
    [1, 2]
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track

    console = Console(stderr=True)
    visible = console.is_terminal or console.is_jupyter
    shown = escape(printable(description, WIDE))
    yield from track(items, shown, total, console=console, transient=True, disable=not visible)


@contextmanager
def bars(wanted: bool) -> Iterator[Progress]:
    """Progress bars if `wanted`, all closed when the block ends.

    >>> with bars(wanted=True) as progress:
    ...     list(progress([1, 2], "reading", 2))
    [1, 2]
    """
    opened: list[Generator[Any, None, None]] = []

    def watch(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
        opened.append(bar(items, description, total))
        return opened[-1]

    try:
        yield watch if wanted else silent
    finally:
        for generator in opened:
            generator.close()
