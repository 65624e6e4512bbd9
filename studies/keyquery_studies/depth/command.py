"""`keyquery study depth`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import (
    DEVICE,
    INT,
    WORKERS,
    Device,
    Out,
    Output,
    Vocabulary,
    WindowLength,
    Workers,
    chosen,
    writes,
)

Rates = Annotated[
    list[float] | None,
    typer.Option(metavar="<float>", help="A learning rate, at width 128; repeatable. Default: 1e-3, 2e-3, 4e-3."),
]


@writes("json", "csv", "picture")
def depth(
    data: Annotated[
        Path | None,
        typer.Option(help="A text file, plain or compressed, or a folder with one. Default: the tokens in --out."),
    ] = None,
    out: Out = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            metavar=INT,
            help="Number of non-embedding parameters; repeatable. Default: 0.33, 1 and 4 million.",
        ),
    ] = None,
    layers: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="A number of layers; repeatable. Default: eight depths from 1 to 24."),
    ] = None,
    rate: Rates = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            metavar=INT, help="A seed; repeatable; the first is trained at all learning rates. Default: two seeds."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per model, at a batch size of 128 windows.")] = 1000,
    length: WindowLength = 128,
    vocabulary: Vocabulary = 1024,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after this many minutes; with --out, a later run resumes.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile each block with torch.compile.")] = False,
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """Which depth is best for a parameter budget, and does it grow with the budget as `keyquery depth` predicts?

    Decoders of three sizes and eight depths are trained on the same text, each at its best learning rate, and their
    heads are analysed. Takes less than 25 minutes on one H200 with 16 --workers; with --out, an interrupted run can be
    resumed.
    """
    from keyquery_studies.depth.study import Plan, run

    options = chosen(budgets=budget, depths=layers, rates=rate, seeds=seed)
    options |= {"steps": steps, "length": length, "vocabulary": vocabulary}
    with output.watching() as progress:
        reading = run(data, out, Plan(**options), device, workers, minutes, compiled, output.force, progress)
    output.deliver(reading)
