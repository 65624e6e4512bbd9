"""A Reading as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from keyquery.kinds import show_of
from keyquery.reading import Reading
from keyquery.support.printable import TEXT, printable, printable_copy
from keyquery.support.progress import WIDE, tokens_in


def plain_console(stderr: bool = False) -> Console:
    """A console that does not interpret markup or emoji names."""
    return Console(stderr=stderr, markup=False, emoji=False)


def show(reading: Reading, console: Console) -> None:
    """Print a reading with the display of its kind, or its records if it has none.

    Its strings come from untrusted files, so control characters and rich markup in them are neutralised.
    """
    lines, shown = getattr(show_of(reading), "lines", None), printable_copy(reading, TEXT)
    for line in lines(shown) if lines else shown.records():
        console.print(line, markup=False, emoji=False)


class TokenRate(ProgressColumn):
    """Tokens per second, where a model runs."""

    def render(self, task: Task) -> Text:
        """The mean rate so far."""
        tokens = task.fields.get("tokens", 0)
        return Text(f"{tokens / task.elapsed:,.0f} tokens/s" if tokens and task.elapsed else "")


@contextmanager
def progress_bars(console: Console, wanted: bool) -> Any:
    """A function that wraps an iterable in a progress bar; silent if the console is not a terminal."""
    named = TextColumn("{task.description}", markup=False)
    columns = (named, BarColumn(), MofNCompleteColumn(), TokenRate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bars:

        def watch(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
            task = bars.add_task(printable(description, WIDE), total=total, tokens=0)
            for item in items:
                yield item
                count = bars.tasks[task].fields["tokens"] + tokens_in(items, item)
                bars.update(task, advance=1, tokens=count)

        yield watch
