"""`keyquery study causes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, WORKERS, Device, Out, Output, ThreeSeeds, Workers, chosen, writes


@writes("json", "csv", "picture")
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
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """Does the causal graph of attention give shorter or cheaper explanations than other token orders?

    Small Transformers are trained on review sentiment and on next-item recommendation. Then words or items are masked
    until the prediction changes, in the order of the graph, attention, gradient × input, position, or at random. Ten
    minutes per training run on one core.
    """
    from keyquery_studies.causes.study import run

    named = {"sentiment": reviews, "recommendation": retail}
    sources = {name: path for name, path in named.items() if path is not None}
    if not sources:
        raise ValueError("give at least one file: --reviews or --retail")
    with output.watching() as progress:
        reading = run(
            sources,
            out,
            **chosen(seeds=seed),
            count=count,
            steps=steps,
            device=device,
            workers=workers,
            progress=progress,
        )
    output.deliver(reading)
