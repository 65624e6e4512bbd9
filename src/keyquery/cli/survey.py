"""`keyquery survey`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import typer

from keyquery.cli.options import PATH, PRINTED, READING, REQUIRED, argument, command, option, written
from keyquery.pages import terminal
from keyquery.support.printable import message
from keyquery.support.progress import bars


@command(
    calls=None,
    models=argument(
        list[str],
        "Folders, files, globs, a .txt file that lists them, hub models, or training runs (all checkpoints).",
        metavar="MODELS...",
    ),
    out=option(Path, "Folder for results; results already recorded there are reused.", REQUIRED, metavar=PATH),
    workers=option(int | None, "Number of local worker processes. Default: one per core.", min=1),
    scheduler=option(
        str | None,
        "Address of a Dask scheduler, such as tcp://127.0.0.1:8786. Default: local processes. "
        "An open Dask port lets anyone run code: start Dask with --host 127.0.0.1 or TLS.",
    ),
    **READING,
    quiet=PRINTED["quiet"],
)
def survey(models: list[str], out: Path, quiet: bool, **options: Any) -> None:
    """Run look on many checkpoints, and report how heads change with training and size.

    Examples: `keyquery survey models/* --out atlas` · `keyquery survey run --out steps` (a training run: all of its
    checkpoint-500, step1000, …) · `keyquery survey models.txt --out atlas --scheduler tcp://127.0.0.1:8786`

    Every finished model is recorded: a survey that was interrupted resumes there, and gives the same result byte for
    byte. Checkpoints that cannot be read are listed at the end (exit code 1) and do
    not stop the others. In --out, only files written by a survey are ever deleted or replaced. Requires the extra: pip
    install 'keyquery[survey]'.
    """
    from keyquery.survey import run

    if options["scheduler"] is not None and options["workers"] is not None:
        raise ValueError("give --workers (local processes) or --scheduler (a cluster), not both")
    if options["scheduler"] is not None:
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors that matter are reported by the survey
    with _ending(), bars(wanted=not quiet) as progress:
        reading = run(models, out, progress=progress, **options)
    if not quiet:
        terminal.show(reading, terminal.plain_console())
        written(out / "index.html")
    elif reading.broken:
        for row in reading.broken:
            typer.echo(message(f"keyquery: could not read {row['name']}: {row['why']}"), err=True)
    if reading.broken:
        raise typer.Exit(1)


@contextmanager
def _ending() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the survey like an interrupt, so that processes and temporary files are removed."""

    def leave(number: int, _: Any) -> None:
        for handled in usual:
            signal.signal(handled, signal.SIG_IGN)  # further signals while cleaning up
        typer.echo("keyquery: terminated; recorded results are kept, and the same command resumes", err=True)
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]
    if current_thread() is not main_thread():  # only the main thread may set handlers
        numbers = []
    usual = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # leaves those nohup ignores
    for number in usual:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)
