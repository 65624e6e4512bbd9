"""`keyquery prove`."""

from __future__ import annotations

import json as jsons
from pathlib import Path

import typer

from keyquery.cli.options import Output, argument, command, option
from keyquery.proof.proof import prove as prove_one
from keyquery.support.files import write_all
from keyquery.support.printable import printable

FAILED = ("wrong", "missing layers", "refused", "cannot be built")


@command(
    model=argument(str, "A config type of transformers, such as qwen3, or a folder with a config.json."),
    json=option(Path | None, "Write the proof to this JSON file."),
)
def prove(model: str, json: Path | None, output: Output) -> None:
    """Test whether a model type is read exactly, on a tiny random model of that type.

    The model is built, saved and read, and all scores are compared. Every attention module counts: self- and
    cross-attention, encoder, decoder, vision tower, pooling. Exact means that the scores before each softmax agree to a
    relative error of 1e-5, at several positions. Nothing is downloaded.

    Exit code: 1 if the type is read wrongly or with missing layers, refused, or cannot be built.
    """
    if "/" in model and not Path(model).exists():
        raise ValueError(f"there is no {model}")
    output = output.also(json=json)
    proof = prove_one(model)
    write_all({path: jsons.dumps([proof.as_dict()], indent=1) + "\n" for path in output.files.values()})
    if not output.quiet:
        typer.echo("\n".join(map(printable, str(proof).splitlines())))
    if proof.status in FAILED:
        raise typer.Exit(1)
