"""What several commands take, and how they hand over what they measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from keyquery import report
from keyquery.reading import Reading
from keyquery.report.kit import terminal
from keyquery.report.kit.terminal import plain_console
from keyquery.support.files import check_target, csv_text, write_all
from keyquery.support.printable import printable
from keyquery.support.progress import Progress

Json = Annotated[Path | None, typer.Option(help="Write every figure to this JSON file.")]
Csv = Annotated[Path | None, typer.Option(help="Write its table to this CSV file.")]
Html = Annotated[Path | None, typer.Option(help="Write a page to look at to this HTML file; it opens offline.")]
Picture = Annotated[Path | None, typer.Option(help="Draw the picture of it to this .svg, .png or .pdf file.")]
Ids = Annotated[
    Path | None, typer.Option(help="In place of --text: token ids, a sequence a line, integers; no line is cut.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No tables and no progress; errors are still told.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Out = Annotated[
    Path | None, typer.Option(file_okay=False, help="Keep every result here; what is done is not done again.")
]
Workers = Annotated[int, typer.Option(min=1, help="How many trainings share the device.")]
INT, STR, PATH = "<int>", "<str>", "<path>"  # what one of several is: a list is not what a user types
# Seeds of a study, by how many it has of its own.
ThreeSeeds = Annotated[
    list[int] | None, typer.Option(metavar=INT, help="A seed; may be given several times. Without: three.")
]
FiveSeeds = Annotated[
    list[int] | None, typer.Option(metavar=INT, help="A seed; may be given several times. Without: five.")
]


def watching(quiet: bool) -> AbstractContextManager[Progress]:
    """Bars for what takes long, on standard error."""
    return terminal.progress_bars(plain_console(stderr=True), wanted=not quiet)


def deliver(
    reading: Reading,
    targets: dict[str, Path],
    quiet: bool,
    joined: bool = False,
    page_of: Reading | None = None,
    others: Mapping[str, Callable[[], str | bytes]] | None = None,
) -> None:
    """Write what was asked for, all or nothing, and show the reading; the page may be of another one.

    `others` make files that only one command has.
    """
    makers: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: reading.to_json() + "\n",
        "csv": lambda: csv_text(reading.records()),
        "html": lambda: report.page(page_of or reading),
        "picture": lambda: report.picture_bytes(targets["picture"], reading, joined),
        **(others or {}),
    }
    write_all({path: makers[name]() for name, path in targets.items()})  # all are made before one is written
    if not quiet:
        terminal.show(reading, plain_console())
        for path in targets.values():
            written(path)


def written(path: Path) -> None:
    """Say where a file is."""
    plain_console().print(Text(f"Written: {printable(str(path))}"), soft_wrap=True)


def targets(force: bool, **paths: Path | None) -> dict[str, Path]:
    """The files that are asked for, by option. Before any work: could all of them be written?"""
    found = {name: path for name, path in paths.items() if path is not None}
    for path in found.values():
        check_target(path, force)
    if "picture" in found:
        report.check_picture(found["picture"])
    places: dict[Path, str] = {}
    for name, path in found.items():
        if (other := places.setdefault(path.resolve(), name)) != name:
            raise ValueError(f"--{other} and --{name} name the same file")
    return found
