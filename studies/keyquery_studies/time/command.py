"""`keyquery study time`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, WORKERS, Device, Out, Output, ThreeSeeds, Workers, chosen, writes


@writes("json", "csv", "picture")
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
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """Does continuous-time attention beat attention that knows only the order of events?

    Predicts the next event of held-out users from their history, with position embeddings, Bochner and Mercer time
    encodings in three variants, and calendar dates; also measures the value of knowing the time of the next event. Two
    minutes per training run on one core.
    """
    from keyquery_studies.time.study import run

    named = {"badges": badges, "retail": retail, "cdnow": cdnow}
    sources = {name: path for name, path in named.items() if path is not None}
    if not sources:
        raise ValueError("give at least one event file: --badges, --retail or --cdnow")
    with output.watching() as progress:
        reading = run(
            sources,
            out,
            **chosen(seeds=seed),
            epochs=epochs,
            width=width,
            device=device,
            workers=workers,
            progress=progress,
        )
    output.deliver(reading)
