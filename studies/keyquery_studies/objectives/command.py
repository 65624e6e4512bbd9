"""`keyquery study objectives`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import (
    INT,
    Csv,
    Device,
    Force,
    Json,
    Picture,
    Quiet,
    deliver,
    targets,
    watching,
)
from keyquery.layers import Shape

Minutes = Annotated[
    float | None, typer.Option(min=0, help="Break a training on the arena off after so many; --out goes on.")
]


def objectives(
    corpus: Annotated[Path, typer.Option(help="A text file to train on, packed by xz or not.")],
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write both models here; a run broken off is gone on with.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(metavar=INT, help="A seed; may be given several times. Without: 0.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 6000,
    width: Annotated[int, typer.Option(min=4, help="The models' width.")] = 128,
    depth: Annotated[int, typer.Option(min=1, help="How many layers.")] = 4,
    vocabulary: Annotated[int, typer.Option(min=260, help="How many tokens the tokenizer learns.")] = 4096,
    device: Device = "auto",
    about: Annotated[str, typer.Option(help="What the models' cards say of the text.")] = "",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Train an encoder and a decoder that differ in the objective alone, and see what their heads become, and when.

    Minutes on a GPU; a processor alone takes far longer, and may be interrupted: --out goes on. The models that ship
    are seed 0 on 21 novels.
    """
    from keyquery_studies.objectives.study import run

    files = targets(force, json=json, csv=csv, picture=picture)
    shape = Shape(vocab_size=vocabulary, width=width, depth=depth)
    with watching(quiet) as progress:
        reading = run(corpus, out, seed or [0], steps, shape, device, about, force, progress)
    deliver(reading, files, quiet)
