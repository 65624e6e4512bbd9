"""`keyquery VERB`: the command line, thin."""

from __future__ import annotations

import io
import os
import sys
import traceback
from contextlib import nullcontext, redirect_stdout
from typing import Annotated

import typer

from keyquery import __version__
from keyquery.checkpoints.sources import first_line
from keyquery.cli.causes import causes
from keyquery.cli.depth import depth
from keyquery.cli.flow import flow
from keyquery.cli.look import compare, look
from keyquery.cli.rerank import rerank
from keyquery.cli.surgery import ablate, dial
from keyquery.cli.survey import survey
from keyquery.support.checks import environment_count
from keyquery.support.plugins import commands
from keyquery.support.printable import message, printable, spell_out

app = typer.Typer(
    name="keyquery",
    help="Read, ablate and compare the attention heads of Transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # so that help is wrapped to the terminal, not to the source
    pretty_exceptions_enable=False,
)

app.command()(look)
app.command()(compare)
app.command()(survey)
app.command()(dial)
app.command()(ablate)
app.command()(causes)
app.command()(flow)
app.command()(rerank)
app.command()(depth)
PLUGINS = commands()
for name, command in PLUGINS.items():
    app.add_typer(command, name=name)


def _no_studies() -> None:
    """Claims about attention, each re-run by one command (package keyquery-studies, not installed)."""
    raise ImportError("studies are a package of their own: pip install keyquery-studies, or ./studies of a clone")


if "study" not in PLUGINS:
    app.command("study", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_no_studies)


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


def main() -> None:
    """Run the command line; whatever goes wrong is one sentence on stderr and exit code 2.

    With KEYQUERY_DEBUG in the environment it is the traceback. What came out of files cannot steer the terminal, and
    what its encoding lacks is spelled out.
    """
    spell_out()
    try:
        several = environment_count("RANK", 0) > 0  # of the processes of torchrun the first one speaks
        with redirect_stdout(io.StringIO()) if several else nullcontext():
            app()
    except SystemExit as stop:
        if stop.code == 130:  # what typer makes of an interrupt, without a word
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        if os.environ.get("KEYQUERY_DEBUG"):
            print("\n".join(map(printable, traceback.format_exc().splitlines())), file=sys.stderr)
        else:
            print(f"keyquery: {_sentence(error)}", file=sys.stderr)
        sys.exit(2)


def _sentence(error: Exception) -> str:
    """An error in one line: those that are meant for users as they are, others with their type."""
    said = message(str(error))
    if said and isinstance(error, (OSError, TypeError, ValueError, ImportError)):
        return said
    return f"{type(error).__name__}: {message(first_line(error))} (KEYQUERY_DEBUG=1 shows where)"
