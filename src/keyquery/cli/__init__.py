"""The command line: `keyquery COMMAND`."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
import warnings
from contextlib import nullcontext, redirect_stdout
from typing import Annotated

import typer

from keyquery import __version__
from keyquery.cli.commands import MODULES, Commands, load
from keyquery.support.printable import first_line, message, printable, spell_out

app = typer.Typer(
    name="keyquery",
    cls=Commands,
    help="Read, ablate and compare the attention heads of Transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # the list of commands needs no rich, which is imported for as long as all else here
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


def main() -> None:
    """Run the command line; errors are printed as one line on stderr, with exit code 2.

    If the environment variable KEYQUERY_DEBUG is set, the traceback is printed instead. Control characters that come
    from files are escaped, and characters that the terminal's encoding lacks are transliterated.
    """
    spell_out()
    warnings.showwarning = _warn  # type: ignore[assignment]
    try:
        with redirect_stdout(io.StringIO()) if _rank() > 0 else nullcontext():  # under torchrun, only rank 0 prints
            app()
    except SystemExit as stop:
        if stop.code == 130:  # typer turns an interrupt into this exit code and prints nothing
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        if os.environ.get("KEYQUERY_DEBUG"):
            print("\n".join(map(printable, traceback.format_exc().splitlines())), file=sys.stderr)
        else:
            print(f"keyquery: {_sentence(error)}", file=sys.stderr)
        sys.exit(2)


def _rank() -> int:
    if not os.environ.get("RANK"):
        return 0
    from keyquery.support.checks import environment_count  # it imports torch, which torchrun needs anyway

    return environment_count("RANK", 0)


def _warn(warning: Warning | str, *_: object) -> None:
    """Print a warning as one line on stderr, without the code it comes from."""
    print(f"keyquery: warning: {message(str(warning))}", file=sys.stderr)


def _with_options(text: str) -> str:
    """An error about an argument, by the name of the option where the running command has it: "--key needs --query"."""
    name = next(iter(sys.argv[1:]), "")
    parameters = load(name).params if name in MODULES else ()
    options = {parameter.name: max(parameter.opts, key=len) for parameter in parameters}

    def option(word: re.Match[str]) -> str:
        name = options.get(word[0], word[0])
        return name if name.startswith("--") else word[0]

    return re.sub(
        r"^\w+(?= (?:must|needs)\b)|(?<=\b(?:pass|give) )\w+(?![\w.])|(?<=\bneeds )\w+(?![\w.])", option, text
    )


def _sentence(error: Exception) -> str:
    """Format an error as one line: user errors as they are, unexpected errors with their type."""
    text = _with_options(message(str(error)))
    if text and isinstance(error, (OSError, TypeError, ValueError, ImportError)):
        return text
    return f"{type(error).__name__}: {message(first_line(error))} (KEYQUERY_DEBUG=1 shows where)"
