"""`keyquery study dial`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery import models as shipped
from keyquery.cli.options import DEVICE, INT, PATH, Device, Output, chosen, writes


@writes("json", "csv", "picture")
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
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """Ablate each part of the scores, and measure which abilities the model loses.

    Decoders: next-token prediction, copying of repeated random tokens (induction), look-ups, duplicate tokens, and the
    attention sink on the first token.
    Encoders: masked tokens, and matching the two halves of a passage.
    """
    from keyquery_studies.dial.study import run

    with output.watching() as progress:
        reading = run(
            models or [shipped.DECODER, shipped.ENCODER],
            text or [shipped.LONG_TEXT],
            by,
            **chosen(seeds=seed),
            sequences=sequences,
            length=length,
            device=device,
            progress=progress,
            out=out,
        )
    output.deliver(reading)
