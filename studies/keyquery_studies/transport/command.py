"""`keyquery study transport`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import (
    STR,
    Csv,
    Device,
    FiveSeeds,
    Force,
    Json,
    Out,
    Picture,
    Quiet,
    Workers,
    deliver,
    targets,
    watching,
)


def transport(
    data: Annotated[
        Path | None,
        typer.Option(metavar="<dir>", help="A folder with uci_adult_train.csv and uci_adult_test.csv, packed or not."),
    ] = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="accuracy, course, start, or all.")] = "all",
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar=STR, help="A set of the part accuracy; may be given several times. Without: all."),
    ] = None,
    seed: FiveSeeds = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of every network. Without: as many as each has of its own.")
    ] = None,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Is optimal transport a way to train a classifier, and is it what the training of a Transformer does?

    `kq.TransportClassifier` against Transformers and plainer methods, on classes whose best accuracy is known and on
    public tables; Transformers followed through training; heads that were pre-trained. Half an hour on one core.
    """
    from keyquery_studies.transport.study import run

    files = targets(force, json=json, csv=csv, picture=picture)
    if picture is not None and part != "all":
        raise ValueError("--picture draws all parts of the study together: leave out --part")
    with watching(quiet) as progress:
        reading = run(data, out, part, seed or (0, 1, 2, 3, 4), dataset or (), epochs, device, workers, progress)
    deliver(reading, files, quiet)
