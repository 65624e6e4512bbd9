"""`keyquery study circuit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import PATH, Output, writes

Heads = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[MODEL:]LAYER.HEAD",
        help="A head to measure beside the highest of each role; MODEL is the beginning of a name. Repeatable.",
    ),
]


@writes("json", "csv")
def circuit(
    models: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders or .gguf files of decoders. Default: only small models, which are trained."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar=PATH, help="A text file: random tokens are drawn from its vocabulary.")
    ] = None,
    head: Heads = None,
    both: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODEL:]LAYER.HEAD", help="One of them to measure about global means as well."),
    ] = None,
    bos: Annotated[
        bool, typer.Option("--bos", help="Begin sequences with the BOS token, whose setting .gguf files lose.")
    ] = False,
    training: Annotated[
        bool, typer.Option(help="Also train small models through their phase change, and follow them.")
    ] = True,
    sequences: Annotated[int, typer.Option(min=2, help="Number of sequences per model.")] = 24,
    seconds: Annotated[float, typer.Option(min=0, help="After so many, no further result is computed.")] = float("inf"),
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for results; a later run resumes and skips done work.")
    ] = None,
    *,
    output: Output,
) -> None:
    """Measure which parts of which heads copying needs, with a resampled part and an equal-norm change as controls.

    Beside the costs stand the previous-token, induction and duplicate-token scores of all heads, and the symmetry of
    their weights. Two-layer attention-only models are trained through their induction phase change, and followed.
    """
    from keyquery_studies.circuit.study import run

    with output.watching():
        reading = run(
            models or [],
            text,
            out,
            heads=[_place(name) for name in head or []],
            by_both=[_place(name) for name in both or []],
            bos=bos,
            training=training,
            sequences=sequences,
            seconds=seconds,
        )
    output.deliver(reading)


def _place(name: str) -> tuple[str, int, int]:
    """The beginning of a model's name (none: all models), layer and head."""
    model, _, place = name.rpartition(":")
    layer, _, head = place.partition(".")
    if not (layer.isdigit() and head.isdigit()):
        raise typer.BadParameter(f"a head must be [MODEL:]LAYER.HEAD, such as 8.0 or smollm2:8.0, got {name!r}")
    return model.lower(), int(layer), int(head)
