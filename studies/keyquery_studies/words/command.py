"""`keyquery study words`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery import models
from keyquery.cli.options import DEVICE, STR, WORKERS, Device, Out, Output, ThreeSeeds, Workers, chosen, writes


@writes("json", "csv", "picture")
def words(
    data: Annotated[
        Path | None,
        typer.Option(help="A text file, plain or compressed, or a folder with one. Default: the tokens in --out."),
    ] = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    model: Annotated[
        Path | None, typer.Option(help="A masked language model for the cloze task. Default: the bundled encoder.")
    ] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(metavar=STR, help="'next token' or masked; repeatable. Default: 'next token'."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps per initialisation, at a batch size of 16 windows.")
    ] = 300,
    vocabulary: Annotated[int, typer.Option(min=260, help="Vocabulary size of the trained models.")] = 2048,
    window: Annotated[int, typer.Option(min=1, help="Maximum distance of two tokens to count as a pair.")] = 5,
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """How far do co-occurrence counts go, and are they a good initialisation?

    Masked tokens of held-out text are predicted from co-occurrence (PMI) and by a masked language model; and small
    Transformers are trained from a co-occurrence, a random and a symmetric initialisation. Ten minutes on one core;
    with --out, an interrupted run can be resumed.
    """
    from keyquery_studies.words.study import Plan, run

    options = chosen(seeds=seed, objectives=objective)
    options |= {"steps": steps, "vocabulary": vocabulary, "window": window}
    source, others = (models.ENCODER, [models.DECODER]) if model is None else (model, [])
    with output.watching() as progress:
        reading = run(data, out, source, others, Plan(**options), device, workers, output.force, progress)
    output.deliver(reading)
