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

Steps = Annotated[
    int | None, typer.Option(min=1, help="Steps of a whole training on the arena. Without: as published.")
]


def causes(
    reviews: Annotated[Path | None, typer.Option(help="A .tsv with columns split, label (0 or 1) and text.")] = None,
    retail: Annotated[Path | None, typer.Option(help="Online Retail: its .csv, packed or not.")] = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    count: Annotated[int, typer.Option(min=2, help="Predictions to explain, of each training.")] = 200,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a training. Without: as many as it needs.")] = None,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Are explanations along the causal graph of attention shorter, or cheaper, than those in other orders?

    Small Transformers learn the sentiment of reviews and what a customer buys next. Then words or items are hidden
    until the prediction changes: along the graph, by attention, by gradient × input, by place, at random. Ten minutes
    a training on one core.
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
