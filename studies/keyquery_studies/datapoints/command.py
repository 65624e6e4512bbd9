"""`keyquery study datapoints`: tables, whose rows attend to rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery.cli.options import (
    INT,
    STR,
    Csv,
    Device,
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

Tables = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="boston, yacht, concrete, breast; or large: protein, adult, poker, forest, higgs; may be given several "
        "times. Without: the first four.",
    ),
]
Folds = Annotated[
    list[int] | None,
    typer.Option(
        metavar=INT, help="A fold; may be given several times. Without: all ten, of yacht and concrete the first three."
    ),
]
Protocols = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="published: test rows stand in the table in training, without targets; inductive: they come later, one "
        "by one. May be given several times. Without: both.",
    ),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="general, symmetric, psd, skew or split, between rows, of the part kernels; may be given several times. "
        "Without: all.",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0, help="Break all trainings off after so many, counted from the start; --out goes on."),
]
Precision = Annotated[
    str | None,
    typer.Option(help="Of a GPU: bf16, tf32 or full. Without: tf32 of published trainings, bf16 of the others."),
]


def datapoints(
    data: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="A folder of tables, packed or not: uci_boston_data.txt, uci_yacht_data.txt, uci_concrete_data.txt; "
            "breast_cancer.csv, which an earlier run leaves in --out, if scikit-learn is not there.",
        ),
    ] = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="npt, kernels, baselines, lookup, or all.")] = "all",
    table: Tables = None,
    fold: Folds = None,
    protocol: Protocols = None,
    kernel: Kernels = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of every training. Without: as the protocol says.")] = None,
    embedding: Annotated[int | None, typer.Option(min=1, help="Numbers an entry. Without: likewise.")] = None,
    depth: Annotated[int, typer.Option(min=1, help="Layers, rows and columns in turn.")] = 8,
    minutes: Minutes = None,
    precision: Precision = None,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """What is attention between rows worth? Networks that see a whole table, against trees, neighbours and perceptrons.

    Published folds and settings. Then every other row is corrupted, to see how much is read off other rows; heads
    between rows are split into their symmetric and skew parts; kernels between rows are compared. Minutes on a GPU with
    many --workers; with --out it may be broken off at any time, or by --minutes, and goes on.
    """
    from keyquery_studies.datapoints.study import Plan, run

    files = targets(force, json=json, csv=csv, picture=picture)
    if picture is not None and part == "lookup":
        raise ValueError("--picture draws the parts npt, baselines and kernels, not lookup")
    named = {"tables": table, "folds": fold, "protocols": protocol, "kernels": kernel}
    given: dict[str, Any] = {name: tuple(values) for name, values in named.items() if values}
    given |= {"part": part, "steps": steps, "embedding": embedding, "depth": depth}
    given |= {"minutes": minutes, "precision": precision}
    with watching(quiet) as progress:
        reading = run(data, out, Plan(**given), device, workers, progress)
    deliver(reading, files, quiet)
