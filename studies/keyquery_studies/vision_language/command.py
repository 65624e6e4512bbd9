"""`keyquery study vision-language`: images with things in cells, and sentences about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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

Data = Annotated[
    Path | None,
    typer.Option(
        metavar="<path>",
        help="Images of things, such as CIFAR-10: an .npz file, or a folder with one subfolder a class.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(metavar="<file>", help="A DINOv2 backbone, .safetensors; without it, that variant is left out."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="digits, 'fine digits' or cifar; may be given several times. Without: digits, and cifar with --data.",
    ),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="parser, 'no MFR', 'random MFR', 'frozen patches', symmetric, split or DINOv2; several may be given.",
    ),
]
Scenes = Annotated[
    int | None,
    typer.Option(min=1, help="Images that are learned from. Without: 20,000, 30,000 of fine digits, 60,000 of cifar."),
]


def vision_language(
    data: Data = None,
    weights: Weights = None,
    out: Out = None,
    dataset: Sets = None,
    variant: Variants = None,
    seed: FiveSeeds = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of every training.")] = 10,
    scenes: Scenes = None,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Is a visual parser that learns worth it, is "left of" carried by skew scores, and does flow say what matters?

    `kq.VisualParser` and its variants learn from images with things in cells and sentences about two of them, and are
    asked about pairs never said: matching, relations, retrieval, filling words. Parts of the scores are turned off, and
    flow between image and text is held against what shuffled images cost. Digits take minutes of a core a training,
    with --scenes 4000 one or two; photographs want a GPU.
    """
    from keyquery_studies.vision_language.study import SEEDS, run

    files = targets(force, json=json, csv=csv, picture=picture)
    chosen: dict[str, Any] = {"sets": dataset or (), "variants": variant or (), "seeds": seed or SEEDS}
    with watching(quiet) as progress:
        reading = run(
            data,
            out,
            weights,
            **chosen,
            epochs=epochs,
            scenes=scenes,
            device=device,
            workers=workers,
            progress=progress,
        )
    deliver(reading, files, quiet)
