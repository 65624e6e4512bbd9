"""`keyquery study causes`."""

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


def causes(
    reviews: Annotated[
        Path | None, typer.Option(help="Reviews: a .tsv with columns split, label (0 or 1) and text.")
    ] = None,
    retail: Annotated[Path | None, typer.Option(help="Online Retail: its .csv, plain or compressed.")] = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    count: Annotated[int, typer.Option(min=2, help="Number of predictions to explain per trained model.")] = 200,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps. Default: as many as the task needs.")
    ] = None,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Does the causal graph of attention give shorter or cheaper explanations than other token orders?

    Small Transformers are trained on review sentiment and on next-item recommendation. Then words or items are masked
    until the prediction changes, in the order of the graph, attention, gradient × input, position, or at random. Ten
    minutes per training run on one core.
    """
    from keyquery_studies.causes.study import run

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"sentiment": reviews, "recommendation": retail}
    sources = {name: path for name, path in named.items() if path is not None}
    if not sources:
        raise ValueError("give at least one file: --reviews or --retail")
    with watching(quiet) as progress:
        reading = run(sources, out, seed or (0, 1, 2), count, steps, device, workers, progress)
    deliver(reading, files, quiet)
