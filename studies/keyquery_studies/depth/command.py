"""`keyquery study depth`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery.cli.options import INT, Csv, Device, Force, Json, Out, Picture, Quiet, Workers, deliver, targets, watching

Rates = Annotated[
    list[float] | None,
    typer.Option(
        metavar="<float>", help="A learning rate, at width 128; may be given several times. Without: 1e-3, 2e-3, 4e-3."
    ),
]


def depth(
    data: Annotated[
        Path | None,
        typer.Option(help="A text file, packed or not, or a folder with one; without, the tokens in --out."),
    ] = None,
    out: Out = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            metavar=INT,
            help="Parameters without embeddings; may be given several times. Without: .33, 1 and 4 million.",
        ),
    ] = None,
    layers: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="A depth; may be given several times. Without: eight from 1 to 24."),
    ] = None,
    rate: Rates = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="A seed; may be given several times; the first tries all rates. Without: two."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model, of 128 windows.")] = 1000,
    length: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 128,
    vocabulary: Annotated[int, typer.Option(min=260, help="How many tokens the tokenizer learns.")] = 1024,
    minutes: Annotated[float | None, typer.Option(min=0, help="Break off after so many; --out goes on.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile each block by torch.compile.")] = False,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Which depth is best for a number of parameters, and does it grow with them? Beside the law of `keyquery depth`.

    Decoders of three budgets and eight depths read the same text, each with the learning rate that suits it; and what
    their heads become is told. Planned for less than 25 minutes of one H200 with 16 --workers; with --out it may be
    broken off, and goes on.
    """
    from keyquery_studies.depth.study import Plan, run

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"budgets": budget, "depths": layers, "rates": rate, "seeds": seed}
    given: dict[str, Any] = {name: tuple(values) for name, values in named.items() if values}
    given |= {"steps": steps, "length": length, "vocabulary": vocabulary}
    with watching(quiet) as progress:
        reading = run(data, out, Plan(**given), device, workers, minutes, compiled, force, progress)
    deliver(reading, files, quiet)
