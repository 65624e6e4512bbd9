"""`keyquery study datapoints`: cross-row attention on tabular data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, INT, STR, WORKERS, Device, Out, Output, Workers, chosen, writes

Tables = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="boston, yacht, concrete, breast; or large: protein, adult, poker, forest, higgs; repeatable. "
        "Default: the first four.",
    ),
]
Folds = Annotated[
    list[int] | None,
    typer.Option(metavar=INT, help="A fold; repeatable. Default: all ten; the first three of yacht and concrete."),
]
Protocols = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="published: test rows are part of the training table, without targets (transductive); inductive: they are "
        "added later, one by one. Repeatable. Default: both.",
    ),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="For the part kernels: kernel of the attention between rows: general, symmetric, psd, skew or split; "
        "repeatable. Default: all.",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0, help="Stop all training after this many minutes in total; with --out, a later run resumes."),
]
Precision = Annotated[
    str | None,
    typer.Option(help="GPU precision: bf16, tf32 or full. Default: tf32 for the published protocol, else bf16."),
]


@writes("json", "csv", "picture")
def datapoints(
    data: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="A folder of tables, plain or compressed: uci_boston_data.txt, uci_yacht_data.txt, "
            "uci_concrete_data.txt. The breast cancer table comes with scikit-learn.",
        ),
    ] = None,
    out: Out = None,
    part: Annotated[
        str,
        typer.Option(
            help="npt, kernels, baselines, lookup, grid (transduction × masked targets), or all (without grid)."
        ),
    ] = "all",
    table: Tables = None,
    fold: Folds = None,
    protocol: Protocols = None,
    kernel: Kernels = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: set by the protocol.")] = None,
    embedding: Annotated[
        int | None, typer.Option(min=1, help="Embedding width per table entry. Default: set by the protocol.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Number of layers, alternating between rows and columns.")] = 8,
    minutes: Minutes = None,
    precision: Precision = None,
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """What is cross-row attention worth? NPTs against gradient-boosted trees, nearest neighbours and MLPs.

    Uses the published folds and settings. All other rows are then corrupted, to measure how much the network reads
    from them; cross-row heads are split into symmetric and skew parts; and kernels between rows are compared. Minutes
    on a GPU with many --workers; with --out, a run that was interrupted, or stopped by --minutes, can be resumed.
    """
    from keyquery_studies.datapoints.study import Plan, run

    if "picture" in output.files and part == "lookup":
        raise ValueError("--picture shows the parts npt, baselines and kernels, not lookup")
    options = chosen(tables=table, folds=fold, protocols=protocol, kernels=kernel)
    options |= {"part": part, "steps": steps, "embedding": embedding, "depth": depth}
    options |= {"minutes": minutes, "precision": precision}
    with output.watching() as progress:
        reading = run(data, out, Plan(**options), device, workers, progress)
    output.deliver(reading)
