"""`keyquery VERB`: the command line, thin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keyquery import __version__, models, report
from keyquery.instruments.geometry import look as look_at

app = typer.Typer(
    name="keyquery",
    help="What a Transformer's heads compare, what they point at, how much they follow the crowd.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"keyquery {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def look(
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the small Transformer to look at.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this JSON file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write one line a head to this CSV file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Show the geometry of every head: how much of it compares, how much of it points.

    The model is a small untrained Transformer, made from a seed.
    """
    targets = [path for path in (json, csv) if path is not None]
    for path in targets:
        report.check_target(path, force)
    if len({path.resolve() for path in targets}) < len(targets):
        raise ValueError("--json and --csv name the same file")
    reading = look_at(models.seeded(seed), name=f"untrained Transformer, seed {seed}")
    if json is not None:
        reading.to_json(json)
    if csv is not None:
        report.write_csv(csv, reading.records())
    if not quiet:
        report.show(reading, Console())


def main() -> None:
    """Run the command line; a wrong input is one sentence on stderr and exit code 2."""
    try:
        app()
    except (OSError, TypeError, ValueError) as error:
        print(f"keyquery: {error}", file=sys.stderr)
        sys.exit(2)
