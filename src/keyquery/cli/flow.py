"""`keyquery flow`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from keyquery.capture.load import load_model, load_processor, pick_device
from keyquery.cli.options import Csv, Device, Force, Html, Json, Picture, Quiet, deliver, targets
from keyquery.instruments.flow.counting import SINK
from keyquery.instruments.flow.flow import flow as measure_flow
from keyquery.report.flow.page import HEADS


def flow(
    model: Annotated[str, typer.Argument(help="A folder with a model and its processor or tokenizer.")],
    image: Annotated[Path | None, typer.Option(help="An image file, of a vision-language model.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="The text beside the image; without one, give --text twice: flow between two texts."),
    ] = None,
    special: Annotated[
        str, typer.Option(help="Tokens such as [CLS]: leave (out), or count (as a class of their own).")
    ] = "leave",
    keep: Annotated[
        int | None,
        typer.Option(min=0, help=f"Keep the maps of so many heads, the strongest; with --html, {HEADS} unless given."),
    ] = None,
    sink: Annotated[
        float,
        typer.Option(
            help="Heads are ranked without keys that take more than this share of a head's attention; 1: none."
        ),
    ] = SINK,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    html: Html = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Measure how much attention crosses between image and text, or between two texts, in every layer and head.

    Raw, with the residual stream, rolled out over the layers and weighted by what tokens carry; each beside its chance
    level, that of uniform attention. The page shows one head's image lit by the words that look at it.
    """
    files = targets(force, json=json, csv=csv, html=html, picture=picture)
    if special not in ("leave", "count"):
        raise ValueError(f"--special must be leave or count, got {special!r}")
    if image is not None and not image.is_file():
        raise FileNotFoundError(f"there is no image {image}")
    if files_given := [one for one in text or () if Path(one).suffix and os.path.isfile(one)]:
        raise ValueError(f"--text is the text itself, and {files_given[0]} is a file: give what is in it")
    if not text:
        raise ValueError("give the text as --text TEXT, beside an --image FILE or a second --text")
    live, tokenizer = load_model(model)
    reading = measure_flow(
        live.to(pick_device(device)),
        text=text,
        image=image,
        processor=load_processor(model) or tokenizer,
        counted=special == "count",
        keep=keep if keep is not None else HEADS if html is not None else 0,
        sink=sink,
        name=Path(model).name,
    )
    deliver(reading, files, quiet)
