"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

# Takes what is gone through, what to call it, and how many there are; gives the same things back, watched.
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


def silent(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """Progress that nobody watches.

    >>> list(silent([1, 2], "reading", 2))
    [1, 2]
    """
    return items


def bar(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """A bar on stderr, in a terminal or a notebook.

    >>> list(bar([1, 2], "reading", 2))
    [1, 2]
    """
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total, console=Console(stderr=True), transient=True)
