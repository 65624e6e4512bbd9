"""Progress of long computations."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from keyquery.support.printable import printable

SECONDS = 10.0  # between lines
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
            print(
                f"{printable(description, WIDE)}: {number} of {total}, {now - start:.0f} s", file=sys.stderr, flush=True
            )
            last = now
        yield item


def bar(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
    """Show a bar while items are taken; a caller that stops early must close it."""
    with bars(wanted=True) as watch:
        yield from watch(items, description, total)


@contextmanager
def bars(wanted: bool, logged: bool = True) -> Iterator[Progress]:
    """Bars on stderr in a terminal or notebook if `wanted`, closed when the block ends; else `lines`, if `logged`."""
    if not wanted:
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Display

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield lines if logged else silent
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Display(*columns, console=console, transient=True) as display:

        def watch(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
            task = display.add_task(printable(description, WIDE), total=total, rate="")
            start, tokens = time.monotonic(), 0
            for number, item in enumerate(items, 1):
                yield item
                tokens += tokens_in(items, item)
                seconds = max(time.monotonic() - start, 1e-9)
                rate = f"{tokens / seconds:,.0f} tokens/s" if tokens else f"{number / seconds:.3g}/s"
                display.update(task, advance=1, rate=rate)

        yield watch
