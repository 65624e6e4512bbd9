"""Progress of long computations, with rate and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from keyquery.support.printable import printable
from keyquery.support.progress import WIDE, Progress, silent

EVERY = 30.0  # seconds between lines if there is no terminal


class Rate(ProgressColumn):
    """Items per second."""

    def render(self, task: Task) -> Text:
        """The recent rate, or nothing at the start."""
        return Text(f"{task.speed:.3g}/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def paced(console: Console, wanted: bool, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Progress bars with a rate in a terminal; elsewhere, as in the log of a cluster, a line every 30 seconds."""
    if not wanted:
        yield silent
    elif not console.is_terminal:
        yield lambda items, description, total: _lines(console, items, description, total, clock)
    else:
        named = TextColumn("{task.description}", markup=False)
        columns = (named, BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        with Bars(*columns, console=console, transient=True) as bars:
            yield lambda items, text, total: bars.track(items, total=total, description=printable(text, WIDE))


def _lines(
    console: Console, items: Iterable[Any], description: str, total: int, clock: Callable[[], float]
) -> Iterator[Any]:
    begun = printed = clock()
    for count, item in enumerate(items, 1):
        yield item
        now = clock()
        if now - printed >= EVERY:
            printed = now
            rate = count / (now - begun)
            left = timedelta(seconds=round(max(total - count, 0) / rate))
            line = f"{printable(description, WIDE)}: {count:,} of {total:,}, {rate:.3g}/s, {left} left"
            console.print(Text(line), soft_wrap=True)
