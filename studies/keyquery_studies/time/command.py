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
    badges: Annotated[
        Path | None, typer.Option(help="Stack Overflow badges: an .npz with time, event and offsets.")
    ] = None,
    retail: Annotated[Path | None, typer.Option(help="Online Retail: its .csv, plain or compressed.")] = None,
    cdnow: Annotated[Path | None, typer.Option(help="CDNOW: its master file, plain or compressed.")] = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs, with early stopping.")] = 20,
    width: Annotated[int, typer.Option(min=8, help="Width of the models.")] = 32,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Does continuous-time attention beat attention that knows only the order of events?

    Predicts the next event of held-out users from their history, with position embeddings, Bochner and Mercer time
    encodings in three variants, and calendar dates; also measures the value of knowing the time of the next event. Two
    minutes per training run on one core.
    """
    from keyquery_studies.time.study import run

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"badges": badges, "retail": retail, "cdnow": cdnow}
    sources = {name: path for name, path in named.items() if path is not None}
    if not sources:
        raise ValueError("give at least one event file: --badges, --retail or --cdnow")
    with watching(quiet) as progress:
        reading = run(sources, out, seed or (0, 1, 2), epochs, width, device, workers, progress)
    deliver(reading, files, quiet)
