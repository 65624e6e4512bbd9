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
    arms: Annotated[
        bool,
        typer.Option(
            "--arms",
            help="Compare four models of equal size that see time nowhere, as an input, in the attention scores or in "
            "both; also on a simulated Hawkes process. Five seeds by default.",
        ),
    ] = False,
    seed: ThreeSeeds = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of epochs, with early stopping. Default: 20; arms: 25.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="With --arms: start no training after this many minutes.")
    ] = None,
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
    from keyquery_studies.time.study import run, run_arms

    named = {"badges": badges, "retail": retail, "cdnow": cdnow}
    sources = {name: path for name, path in named.items() if path is not None}
    if not sources and not arms:
        raise ValueError("give at least one event file: --badges, --retail or --cdnow")
    if minutes is not None and not arms:
        raise ValueError("--minutes needs --arms")
    options = chosen(seeds=seed) | ({} if epochs is None else {"epochs": epochs})
    with output.watching() as progress:
        if arms:
            reading = run_arms(
                sources, out, **options, device=device, workers=workers, minutes=minutes, progress=progress
            )
            output.deliver(reading)
            return
        reading = run(
            sources,
            out,
            **options,
            width=width,
            device=device,
            workers=workers,
            progress=progress,
        )
    output.deliver(reading)
