"""`keyquery survey`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Annotated, Any

import typer

from keyquery.cli.look import Config, HeadCount, Key, Layout, Query
from keyquery.cli.options import PATH, Quiet, written
from keyquery.report.kit import terminal
from keyquery.report.kit.progress_bar import paced
from keyquery.support.printable import message

Scheduler = Annotated[
    str | None,
    typer.Option(
        help="The address of a Dask scheduler, such as tcp://127.0.0.1:8786, whose workers measure. "
        "An open Dask port lets anyone run code: start Dask with --host 127.0.0.1 or TLS."
    ),
]


def survey(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODELS...",
            help="Folders, files, globs, a .txt that lists them, hub models; or training runs, with all their steps.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar=PATH, help="The folder of results; what is recorded there is not measured again.")
    ],
    workers: Annotated[
        int | None, typer.Option(min=1, help="How many processes of this machine measure. Without: one a core.")
    ] = None,
    scheduler: Scheduler = None,
    heads: HeadCount = None,
    query: Query = None,
    key: Key = None,
    layout: Layout = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Look at many checkpoints, and say what changes over training, size and families.

    Examples: `keyquery survey models/* --out atlas` · `keyquery survey run --out steps` (a training run: all of its
    checkpoint-500, step1000, …) · `keyquery survey models.txt --out atlas --scheduler tcp://127.0.0.1:8786`

    Work is cut by layer, and every finished layer is recorded: broken off at any moment and started again, nothing is
    measured twice, and the result is the same, byte for byte. A checkpoint that cannot be read is named at the end
    (exit code 1), and does not stop the others. Nothing that no survey wrote is deleted or replaced in --out. Needs the
    extra: pip install 'keyquery[survey]'.
    """
    from keyquery.survey import run

    if scheduler is not None and workers is not None:
        raise ValueError("--workers is about this machine, --scheduler about a cluster: give one of them")
    if scheduler is not None:
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters of it is told in a sentence
    options: dict[str, Any] = {
        "workers": workers,
        "scheduler": scheduler,
        "heads": heads,
        "query": query,
        "key": key,
        "config": config,
        "layout": layout,
    }
    with _ending(), paced(terminal.plain_console(stderr=True), wanted=not quiet) as progress:
        reading = run(models, out, progress=progress, **options)
    if not quiet:
        terminal.show(reading, terminal.plain_console())
        written(out / "index.html")
    elif reading.broken:
        for row in reading.broken:
            typer.echo(message(f"keyquery: not read: {row['name']}: {row['why']}"), err=True)
    if reading.broken:
        raise typer.Exit(1)


@contextmanager
def _ending() -> Iterator[None]:
    """SIGTERM and SIGHUP end the survey as an interrupt does: its processes and temporary files go with it."""

    def leave(number: int, _: Any) -> None:
        for each in usual:
            signal.signal(each, signal.SIG_IGN)  # to leave once is enough
        typer.echo("keyquery: terminated; what is recorded stays, and the same command resumes", err=True)
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]
    if current_thread() is not main_thread():  # where no handlers may be set
        numbers = []
    usual = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # not ignored, as by nohup
    for number in usual:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)
