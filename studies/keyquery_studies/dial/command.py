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
        typer.Argument(help="Folders or .gguf files. Default: the two bundled models."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar=PATH,
            help="A text file, plain or compressed; repeatable. Default: the bundled text.",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help="all: ablate in all heads at once; layer: also per layer; head: also per head.")
    ] = "layer",
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="A seed for random tokens; repeatable. Default: 0."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="Number of sequences per text and seed.")] = 16,
    length: Annotated[int, typer.Option(min=16, help="Tokens per sequence.")] = shipped.LENGTH,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for results; a later run resumes and skips done work.")
    ] = None,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Ablate each part of the scores, and measure which abilities the model loses.

    Decoders: next-token prediction, copying of repeated random tokens (induction), look-ups, duplicate tokens, and the
    attention sink on the first token.
    Encoders: masked tokens, and matching the two halves of a passage.
    """
    from keyquery_studies.dial.study import run

    files = targets(force, json=json, csv=csv, picture=picture)
    chosen, texts = models or [shipped.DECODER, shipped.ENCODER], text or [shipped.LONG_TEXT]
    with watching(quiet) as progress:
        reading = run(chosen, texts, by, _once(seed or [0]), sequences, length, device, progress, out)
    deliver(reading, files, quiet)


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    """Remove duplicate values, in order."""
    return tuple(dict.fromkeys(values))
