"""`keyquery prove`."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from time import perf_counter

import typer

from keyquery.checkpoints.configs.defaults import completed
from keyquery.checkpoints.configs.fields import Field, score_fields
from keyquery.checkpoints.sources import read_json
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
    """Test whether a model type, or a folder's config, is read exactly, on a tiny random model of it.

    The model is built, saved and read, and all scores are compared. Every attention module counts: self- and
    cross-attention, encoder, decoder, vision tower, pooling. Exact means that the scores before each softmax agree to a
    relative error of 1e-5, at several positions. Of a folder, the fields of the config that move scores are listed,
    with what was proven of them before. It takes seconds for most types, minutes for models of several towers. Nothing
    is downloaded.

    Exit code: 1 if the type is read wrongly or with missing layers, refused, or cannot be built.
    """
    if "/" in model and not Path(model).exists():
        raise ValueError(f"there is no {model}")
    output = output.also(json=json)
    start = perf_counter()
    proof = prove_one(model)
    lines = [*str(proof).splitlines(), *map(_line, _fields(model)), f"  {perf_counter() - start:.1f} s"]
    write_all({path: jsons.dumps([proof.as_dict()], indent=1) + "\n" for path in output.files.values()})
    if not output.quiet:
        typer.echo("\n".join(map(printable, lines)))
    if proof.status in FAILED:
        raise typer.Exit(1)


def _fields(model: str) -> list[Field]:
    """The fields of a folder's config that move scores; none of a type."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    return list(score_fields(completed(read_json(file)))) if file.is_file() else []


def _line(field: Field) -> str:
    how = f"not proven: {field.unproven}" if field.unproven else "read"
    return f"  {field.name} = {field.value!r:.60}: {how}"
