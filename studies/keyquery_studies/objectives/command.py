"""`keyquery study objectives`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, INT, Device, Output, Vocabulary, chosen, writes
from keyquery.layers import Shape


@writes("json", "csv", "picture")
def objectives(
    corpus: Annotated[Path, typer.Option(help="A text file to train on, plain or compressed.")],
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for both models; an interrupted run is resumed.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(metavar=INT, help="A seed; repeatable. Default: 0.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per model.")] = 6000,
    width: Annotated[int, typer.Option(min=4, help="Width of the models.")] = 128,
    depth: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    vocabulary: Vocabulary = 4096,
    device: Device = DEVICE,
    about: Annotated[str, typer.Option(help="Description of the corpus for the model cards.")] = "",
    *,
    output: Output,
) -> None:
    """Train an encoder and a decoder that differ in objective and attention mask, and track how their heads develop.

    Minutes on a GPU, far longer on a CPU; with --out, an interrupted run can be resumed. The bundled models are seed 0
    of this study, trained on 21 novels.
    """
    from keyquery_studies.objectives.study import run

    shape = Shape(vocab_size=vocabulary, width=width, depth=depth)
    with output.watching() as progress:
        reading = run(
            corpus,
            out,
            **chosen(seeds=seed),
            steps=steps,
            shape=shape,
            device=device,
            about=about,
            force=output.force,
            progress=progress,
        )
    output.deliver(reading)
