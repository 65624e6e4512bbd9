"""`keyquery study rerank`: learned against training-free re-ranking."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, WORKERS, Device, Out, Output, ThreeSeeds, Workers, chosen, writes

Dino = Annotated[
    Path | None,
    typer.Option(help="DINOv2 weights for --images and --digits: a .safetensors file with transformers' tensor names."),
]
LabelledTexts = Annotated[
    Path | None, typer.Option(help="A .tsv with label and text, or a text of several works separated by form feeds.")
]
BenchmarkFolder = Annotated[
    Path | None,
    typer.Option(help="ROxford or RParis: a folder with gnd_NAME.pkl, NAME.npz or .mat, and train.npz."),
]


@writes("json", "csv", "picture")
def rerank(
    images: Annotated[Path | None, typer.Option(help="Labelled images, such as CIFAR-10: .npz or a folder.")] = None,
    digits: Annotated[bool, typer.Option("--digits", help="Use the digits bundled with scikit-learn.")] = False,
    weights: Dino = None,
    texts: LabelledTexts = None,
    encoder: Annotated[Path | None, typer.Option(help="A folder with a sentence encoder, for --texts.")] = None,
    revisited: BenchmarkFolder = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    items: Annotated[int, typer.Option(min=8, help="Maximum number of images, and of passages.")] = 3000,
    top: Annotated[int, typer.Option(min=2, help="Number of items of each list to re-rank.")] = 128,
    anchors: Annotated[int, typer.Option(min=2, help="Number of top items that all are compared with.")] = 128,
    width: Annotated[int, typer.Option(min=8, help="Width of the networks.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 400,
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """What is learned re-ranking worth, compared with training-free re-ranking?

    Networks are trained on half of the classes and tested on the other half, against plain affinities, query expansion,
    k-reciprocal neighbours and diffusion. A minute per training run on one core; embedding images takes longer.
    """
    from keyquery_studies.rerank.datasets import Sources
    from keyquery_studies.rerank.study import run

    paths = {"images": images, "weights": weights, "texts": texts, "encoder": encoder, "revisited": revisited}
    sources = Sources(digits=digits, items=items, **paths)
    options = chosen(seeds=seed) | {"top": top, "anchors": anchors, "width": width, "steps": steps}
    with output.watching() as progress:
        reading = run(sources, out, **options, device=device, workers=workers, progress=progress)
    output.deliver(reading)
