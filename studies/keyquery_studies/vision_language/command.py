"""`keyquery study vision-language`: images of objects on a grid, and sentences about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, STR, WORKERS, Device, FiveSeeds, Out, Output, Workers, chosen, writes

Data = Annotated[
    Path | None,
    typer.Option(
        metavar="<path>",
        help="Images of objects, such as CIFAR-10: an .npz file, or a folder with one subfolder per class.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(metavar="<file>", help="A DINOv2 backbone, .safetensors. Default: omit that variant."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="digits, 'fine digits' or cifar; repeatable. Default: digits, and cifar if --data is given.",
    ),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="parser, 'no MFR', 'random MFR', 'frozen patches', symmetric, split or DINOv2; repeatable. Default: all.",
    ),
]
Scenes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of training images. Default: 20,000 for digits, 30,000 for fine digits, 60,000 for cifar."
    ),
]


@writes("json", "csv", "picture")
def vision_language(
    data: Data = None,
    weights: Weights = None,
    out: Out = None,
    dataset: Sets = None,
    variant: Variants = None,
    seed: FiveSeeds = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per training run.")] = 10,
    scenes: Scenes = None,
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """Does a learned patch encoder pay, do skew scores carry "left of", and does attention flow show what matters?

    Trains `kq.VisualParser` and its variants on images of objects on a grid and sentences about two of them, and tests
    them on unseen pairs: matching, relations, retrieval and masked words. Parts of the scores are ablated, and flow
    between image and text is compared with the cost of shuffling images. Digits take minutes per training run on one
    core, one or two with --scenes 4000; photographs need a GPU.
    """
    from keyquery_studies.vision_language.study import run

    with output.watching() as progress:
        reading = run(
            data,
            out,
            weights,
            **chosen(sets=dataset, variants=variant, seeds=seed),
            epochs=epochs,
            scenes=scenes,
            device=device,
            workers=workers,
            progress=progress,
        )
    output.deliver(reading)
