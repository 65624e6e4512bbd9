"""`keyquery study rerank`: the top of lists, put in order by networks and by what learns nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import (
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

Dino = Annotated[
    Path | None, typer.Option(help="DINOv2, a .safetensors file with transformers' names, for --images and --digits.")
]
LabelledTexts = Annotated[
    Path | None, typer.Option(help="A .tsv with label and text, or a text of several works divided by form feeds.")
]
BenchmarkFolder = Annotated[
    Path | None,
    typer.Option(help="ROxford, RParis: a folder with gnd_NAME.pkl, NAME.npz or .mat, and train.npz."),
]


def rerank(
    images: Annotated[Path | None, typer.Option(help="Images with labels, such as CIFAR-10: .npz or a folder.")] = None,
    digits: Annotated[bool, typer.Option("--digits", help="The digits that scikit-learn ships.")] = False,
    weights: Dino = None,
    texts: LabelledTexts = None,
    encoder: Annotated[Path | None, typer.Option(help="A folder with a model of sentences, for --texts.")] = None,
    revisited: BenchmarkFolder = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    items: Annotated[int, typer.Option(min=8, help="Images, and passages, to take at most.")] = 3000,
    top: Annotated[int, typer.Option(min=2, help="How many of each list to put in order.")] = 128,
    anchors: Annotated[int, typer.Option(min=2, help="How many of them all are compared with.")] = 128,
    width: Annotated[int, typer.Option(min=8, help="The networks' width.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a training.")] = 400,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """What is a learned order of the top of a list worth, beside orders that learn nothing?

    Networks learn from half of the classes and are tried on the other half, beside affinities alone, query expansion,
    k-reciprocal neighbours and diffusion. A minute a training on one core; vectors of images take longer.
    """
    from keyquery_studies.rerank.datasets import Sources
    from keyquery_studies.rerank.study import run

    files = targets(force, json=json, csv=csv, picture=picture)
    given = {"images": images, "weights": weights, "texts": texts, "encoder": encoder, "revisited": revisited}
    sources = Sources(digits=digits, items=items, **given)
    sizes = {"top": top, "anchors": anchors, "width": width, "steps": steps}
    with watching(quiet) as progress:
        reading = run(sources, out, seed or (0, 1, 2), **sizes, device=device, workers=workers, progress=progress)
    deliver(reading, files, quiet)
