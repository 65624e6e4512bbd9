"""`keyquery study NAME`: claims about attention, each re-run by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keyquery.cli.options import Csv, Force, Json, Picture, Quiet, deliver, targets
from keyquery.layers import Shape
from keyquery.report import terminal

study = typer.Typer(
    help="Claims about attention, each re-run by one command.", no_args_is_help=True, rich_markup_mode="markdown"
)


@study.callback()
def _studies() -> None:
    pass


@study.command("objectives")
def objectives(
    corpus: Annotated[Path, typer.Option(help="A text file to train on, packed by xz or not.")],
    out: Annotated[Path | None, typer.Option(help="Write both models here; a run broken off is gone on with.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="A seed; may be given several times.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 6000,
    width: Annotated[int, typer.Option(min=4, help="The models' width.")] = 128,
    depth: Annotated[int, typer.Option(min=1, help="How many layers.")] = 4,
    vocabulary: Annotated[int, typer.Option(min=260, help="How many tokens the tokenizer learns.")] = 4096,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    about: Annotated[str, typer.Option(help="What the models' cards say of the text.")] = "",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Train an encoder and a decoder that differ in the objective alone, and see what their heads become, and when.

    Minutes on a GPU; a processor alone takes far longer, and may be interrupted: --out goes on. The models that ship
    are seed 0 on 21 novels.
    """
    from keyquery.studies.objectives import objectives as run

    files = targets(force, json=json, csv=csv, picture=picture)
    shape = Shape(vocab_size=vocabulary, width=width, depth=depth)
    with terminal.progress_bars(Console(stderr=True), wanted=not quiet) as progress:
        reading = run(corpus, out, seed or [0], steps, shape, device, about, force, progress)
    deliver(reading, files, quiet)
