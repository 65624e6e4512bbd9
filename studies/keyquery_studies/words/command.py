"""`keyquery study words`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery import models
from keyquery.cli.options import (
    STR,
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
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """How far do co-occurrence counts go, and are they a good initialisation?

    Masked tokens of held-out text are predicted from co-occurrence (PMI) and by a masked language model; and small
    Transformers are trained from a co-occurrence, a random and a symmetric initialisation. Ten minutes on one core;
    with --out, an interrupted run can be resumed.
    """
    from keyquery_studies.words.study import Plan, run

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"seeds": seed, "objectives": objective}
    options: dict[str, Any] = {name: tuple(values) for name, values in named.items() if values}
    options |= {"steps": steps, "vocabulary": vocabulary, "window": window}
    source, others = (models.ENCODER, [models.DECODER]) if model is None else (model, [])
    with watching(quiet) as progress:
        reading = run(data, out, source, others, Plan(**options), device, workers, force, progress)
    deliver(reading, files, quiet)
