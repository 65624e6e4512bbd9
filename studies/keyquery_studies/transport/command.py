"""`keyquery study transport`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, STR, WORKERS, Device, FiveSeeds, Out, Output, Workers, chosen, writes


@writes("json", "csv", "picture")
def transport(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="<dir>", help="A folder with uci_adult_train.csv and uci_adult_test.csv, plain or compressed."
        ),
    ] = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="accuracy, course, start, or all.")] = "all",
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar=STR, help="A data set for the part accuracy; repeatable. Default: all."),
    ] = None,
    seed: FiveSeeds = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs for every network. Default: each network's own setting.")
    ] = None,
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """Can optimal transport train a classifier, and does training a Transformer perform optimal transport?

    Compares `kq.TransportClassifier` with Transformers and simpler methods, on synthetic classes with known Bayes
    accuracy and on public tables; tracks Transformers during training; tests pre-trained heads. Half an hour on one
    core.
    """
    from keyquery_studies.transport.study import run

    if "picture" in output.files and part != "all":
        raise ValueError("--picture needs all parts of the study: omit --part")
    with output.watching() as progress:
        reading = run(
            data,
            out,
            part,
            **chosen(seeds=seed, sets=dataset),
            epochs=epochs,
            device=device,
            workers=workers,
            progress=progress,
        )
    output.deliver(reading)
