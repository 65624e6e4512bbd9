"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from keyquery.support.printable import printable

WIDE = 60  # letters of what is gone through
# Takes what is gone through, what to call it, and how many there are; gives the same things back, watched.
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


def silent(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """Progress that nobody watches.

    >>> list(silent([1, 2], "reading", 2))
    [1, 2]
    """
    return items


def bar(items: Iterable[Any], what: str, total: int) -> Generator[Any, None, None]:
    """A bar on stderr, in a terminal or a notebook; elsewhere nothing. Whoever does not reach the end closes it.

    >>> list(bar([1, 2], "reading", 2))
    [1, 2]
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track

    console = Console(stderr=True)
    seen = console.is_terminal or console.is_jupyter
    called = escape(printable(what, WIDE))
    yield from track(items, called, total, console=console, transient=True, disable=not seen)


@contextmanager
def bars(wanted: bool) -> Iterator[Progress]:
    """Bars where they are wanted, gone when the block ends, however it ends.

    >>> with bars(wanted=True) as progress:
    ...     list(progress([1, 2], "reading", 2))
    [1, 2]
    """
    opened: list[Generator[Any, None, None]] = []

    def watch(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
        opened.append(bar(items, what, total))
        return opened[-1]

    try:
        yield watch if wanted else silent
    finally:
        for one in opened:
            one.close()
