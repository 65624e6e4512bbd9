"""Options that commands share, and the functions that write and print their results."""

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

Json = Annotated[Path | None, typer.Option(help="Write all results to this JSON file.")]
Csv = Annotated[Path | None, typer.Option(help="Write the results as a table to this CSV file.")]
Html = Annotated[Path | None, typer.Option(help="Write a self-contained page to this HTML file; it opens offline.")]
Picture = Annotated[Path | None, typer.Option(help="Write the figure to this .svg, .png or .pdf file.")]
Ids = Annotated[
    Path | None, typer.Option(help="Instead of --text: a file of integer token ids, one sequence per line, never cut.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no tables and no progress; errors are still shown.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Out = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder for results; a later run resumes and skips finished work.")
]
Workers = Annotated[int, typer.Option(min=1, help="Number of training runs that share the device.")]
INT, STR, PATH = "<int>", "<str>", "<path>"  # metavars of options that may be repeated, instead of <list[int]>
# Seeds of a study, named by how many are the default.
ThreeSeeds = Annotated[list[int] | None, typer.Option(metavar=INT, help="A seed; repeatable. Default: three seeds.")]
FiveSeeds = Annotated[list[int] | None, typer.Option(metavar=INT, help="A seed; repeatable. Default: five seeds.")]


def watching(quiet: bool) -> AbstractContextManager[Progress]:
    """Progress bars on standard error, or none if `quiet`."""
    return terminal.progress_bars(plain_console(stderr=True), wanted=not quiet)


def deliver(
    reading: Reading,
    targets: dict[str, Path],
    quiet: bool,
    joined: bool = False,
    page_of: Reading | None = None,
    others: Mapping[str, Callable[[], str | bytes]] | None = None,
) -> None:
    """Write the requested files, all or none, and print the reading.

    Parameters
    ----------
    reading
        The result.
    targets
        Files to write, by option name, as returned by `targets`.
    quiet
        Print nothing.
    joined
        Draw both models of a comparison in one triangle.
    page_of
        The reading to show on the HTML page. Default: `reading`.
    others
        Functions that make the content of files that only one command writes.
    """
    makers: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: reading.to_json() + "\n",
        "csv": lambda: csv_text(reading.records()),
        "html": lambda: report.page(page_of or reading),
        "picture": lambda: report.picture_bytes(targets["picture"], reading, joined),
        **(others or {}),
    }
    write_all({path: makers[name]() for name, path in targets.items()})  # all contents are made before any is written
    if not quiet:
        terminal.show(reading, plain_console())
        for path in targets.values():
            written(path)


def written(path: Path) -> None:
    """Print the path of a file that was written."""
    plain_console().print(Text(f"Written: {printable(str(path))}"), soft_wrap=True)


def targets(force: bool, **paths: Path | None) -> dict[str, Path]:
    """The requested files, by option name; checked to be writable before any work starts."""
    requested = {name: path for name, path in paths.items() if path is not None}
    for path in requested.values():
        check_target(path, force)
    if "picture" in requested:
        report.check_picture(requested["picture"])
    names: dict[Path, str] = {}
    for name, path in requested.items():
        if (other := names.setdefault(path.resolve(), name)) != name:
            raise ValueError(f"--{other} and --{name} name the same file")
    return requested
