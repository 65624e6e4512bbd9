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
        typer.Option(help="A text file, packed or not, or a folder with one; without, the tokens in --out."),
    ] = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    model: Annotated[
        Path | None, typer.Option(help="A model that finds masked tokens, to fill blanks. Without: the one that ships.")
    ] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(metavar=STR, help="next token or masked; may be given several times. Without: next token."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps from each start, of 16 windows.")] = 300,
    vocabulary: Annotated[int, typer.Option(min=260, help="Tokens that what is trained has.")] = 2048,
    window: Annotated[int, typer.Option(min=1, help="How far apart two tokens count as a pair.")] = 5,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """How far does counting go, and is it a good start?

    Blanks in text never seen, filled by how often tokens stand near each other, and by a Transformer that learned to;
    and small Transformers that start from counts, at random, and symmetric. Ten minutes on one core; with --out it may
    be broken off, and goes on.
    """
    from keyquery_studies.words.study import Plan, run

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"seeds": seed, "objectives": objective}
    given: dict[str, Any] = {name: tuple(values) for name, values in named.items() if values}
    given |= {"steps": steps, "vocabulary": vocabulary, "window": window}
    source, others = (models.ENCODER, [models.DECODER]) if model is None else (model, [])
    with watching(quiet) as progress:
        reading = run(data, out, source, others, Plan(**given), device, workers, force, progress)
    deliver(reading, files, quiet)
