"""`keyquery prove`."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import Force, Quiet, targets
from keyquery.support.files import write_all
from keyquery.support.printable import printable
from keyquery.testing.proof import Proof
from keyquery.testing.proof.proof import prove as prove_one
from keyquery.testing.proof.search import sought
from keyquery.testing.proof.sweep import counts, sweep
from keyquery.testing.proof.written import as_toml, family_tables

BAD = ("wrong", "missing layers")
FAILED = (*BAD, "refused", "cannot be built")


def prove(
    model: Annotated[
        str | None, typer.Argument(help="A config type of transformers, such as qwen3, or a folder with a config.json.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All config types of the installed transformers.")] = False,
    cache: Annotated[
        Path | None,
        typer.Option(help="A file of JSON lines: what it holds is not proven again, the rest is added."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search for a reading that is exact, and print it as a TOML file.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write all proofs to this JSON file.")] = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Test whether a model type is read exactly: build a tiny random model, save it, read it, compare all scores.

    Every attention module counts: self- and cross-attention, encoder, decoder, vision tower, pooling. Exact means that
    the scores before each softmax agree to a relative error of 1e-5, at several positions. Nothing is downloaded.

    Exit code: 1 if a type is read wrongly or with missing layers; for a single type, also if it is refused or cannot be
    built.
    """
    if (model is None) == (not every):
        raise ValueError("give a config type, a folder, or --all" + (", not both" if every else ""))
    if model is not None and "/" in model and not Path(model).exists():
        raise ValueError(f"there is no {model}")
    files = targets(force, json=json)
    if search:
        if model is None:
            raise ValueError("--search needs a config type")
        found, lost = sought(model)
        typer.echo(as_toml(family_tables(model, found), f"{model}: found by the search of keyquery prove."), nl=False)
        for owner in lost:
            typer.echo(f"# not explained: {printable(owner)}")
        return
    if cache is not None and model is not None and Path(model).exists():
        raise ValueError(f"--cache is for config types, and {model} is a file or a folder")
    if every:
        proofs = sweep(cache=cache, progress=None if quiet else _show)
    else:
        proofs = [prove_one(str(model))] if cache is None else sweep([str(model)], cache)
    write_all({path: jsons.dumps([proof.as_dict() for proof in proofs], indent=1) + "\n" for path in files.values()})
    if not quiet and not every:
        typer.echo("\n".join(map(printable, str(proofs[0]).splitlines())))
    elif not quiet:
        typer.echo(", ".join(f"{status}: {count}" for status, count in counts(proofs).items()))
    if any(proof.status in (BAD if every else FAILED) for proof in proofs):
        raise typer.Exit(1)


def _show(proof: Proof) -> None:
    typer.echo(printable(str(proof).splitlines()[0]))
