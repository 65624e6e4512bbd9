"""`keyquery study dial`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery import models as shipped
from keyquery.cli.options import (
    INT,
    PATH,
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


def dial(
    models: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders or .gguf files; the two that ship if none."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar=PATH,
            help="A text, compressed by xz or not; may be given several times. Default: the one that ships.",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help="all, layer or head: in all heads at once; also by layer; also by head.")
    ] = "layer",
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="A seed of random tokens; may be given several times. Default: 0."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="How many of each text and seed.")] = 16,
    length: Annotated[int, typer.Option(min=16, help="How many tokens each has.")] = shipped.LENGTH,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep results here, so that an interrupted run is resumed.")
    ] = None,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Leave out each part of the scores, and measure what the model can no longer do.

    Decoders: the next token of a text, repeated random tokens and how many are copied, look-ups, duplicates, attention
    to the first token.
    Encoders: masked words, and which halves of a passage belong together.
    """
    from keyquery_studies.dial.study import run

    files = targets(force, json=json, csv=csv, picture=picture)
    chosen, texts = models or [shipped.DECODER, shipped.ENCODER], text or [shipped.LONG_TEXT]
    with watching(quiet) as progress:
        reading = run(chosen, texts, by, _once(seed or [0]), sequences, length, device, progress, out)
    deliver(reading, files, quiet)


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    """A seed that is given twice is one seed."""
    return tuple(dict.fromkeys(values))
