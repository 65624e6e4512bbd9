"""`keyquery study time`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import (
    Csv,
    Device,
    Force,
    Json,
    Out,
    Picture,
    Quiet,
    ThreeSeeds,
    Workers,
    deliver,
    targets,
    watching,
)


def time(
    badges: Annotated[Path | None, typer.Option(help="Stack Overflow: an .npz of time, event and offsets.")] = None,
    retail: Annotated[Path | None, typer.Option(help="Online Retail: its .csv, packed or not.")] = None,
    cdnow: Annotated[Path | None, typer.Option(help="CDNOW: its master file, packed or not.")] = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="Epochs of a training at most; it stops when it gets no better.")
    ] = 20,
    width: Annotated[int, typer.Option(min=8, help="The models' width.")] = 32,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Does attention that knows when do better than one that knows the order alone?

    The next event of users never seen, by their past: positions, Bochner's and Mercer's codes of time, three ways to
    take them in, dates, and what knowing the time of the next event is worth. Two minutes a training on one core.
    """
    from keyquery_studies.time.study import run

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"badges": badges, "retail": retail, "cdnow": cdnow}
    sources = {name: path for name, path in named.items() if path is not None}
    if not sources:
        raise ValueError("give at least one file of events: --badges, --retail or --cdnow")
    with watching(quiet) as progress:
        reading = run(sources, out, seed or (0, 1, 2), epochs, width, device, workers, progress)
    deliver(reading, files, quiet)
