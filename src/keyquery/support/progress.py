"""Progress of long computations."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from keyquery.support.printable import printable

SECONDS = 5.0  # between lines
WIDE = 60  # characters of a description
# (items, description, number of items) → the same items, wrapped to show progress.
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


class Runs(list[Any]):
    """Runs of a model on the same data, each of so many tokens: a bar shows tokens per second."""

    def __init__(self, items: Iterable[Any], tokens: int) -> None:
        super().__init__(items)
        self.tokens = tokens


def tokens_in(items: Iterable[Any], item: Any) -> int:
    """Tokens of an item: of a batch of token ids, or of one of `Runs`; 0 for anything else."""
    ids = item.get("input_ids") if isinstance(item, Mapping) else None
    return int(getattr(items, "tokens", 0) if ids is None else ids.numel())


def silent(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
    """Show no progress."""
    return items


def lines(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
    """Print a line to stderr every few seconds, so that the log of a long computation shows how far it is."""
    start = last = time.monotonic()
    for number, item in enumerate(items):
        if (now := time.monotonic()) - last >= SECONDS:
            print(f"{description}: {number} of {total}, {now - start:.0f} s", file=sys.stderr, flush=True)
            last = now
        yield item


def bar(items: Iterable[Any], description: str, total: int) -> Generator[Any, None, None]:
    """Show a bar on stderr in a terminal or notebook, else `lines`; a caller that stops early must close it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track

    console = Console(stderr=True)
    shown = printable(description, WIDE)
    if not (console.is_terminal or console.is_jupyter):
        yield from lines(items, shown, total)
        return
    yield from track(items, escape(shown), total, console=console, transient=True)


@contextmanager
def bars(wanted: bool) -> Iterator[Progress]:
    """Progress bars if `wanted`, all closed when the block ends."""
    opened: list[Generator[Any, None, None]] = []

    def watch(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
        opened.append(bar(items, description, total))
        return opened[-1]

    try:
        yield watch if wanted else silent
    finally:
        for generator in opened:
            generator.close()
