"""`keyquery VERB`: the command line, thin."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from keyquery import __version__, models, report
from keyquery.checkpoints.sources import first_line
from keyquery.instruments import Comparison, Look
from keyquery.instruments import compare as side_by_side
from keyquery.instruments import look as look_at
from keyquery.reading import Reading

app = typer.Typer(
    name="keyquery",
    help="What a Transformer's heads compare, what they point at, how much they follow the crowd.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Text = Annotated[Path | None, typer.Option(help="Lines of text to run the model on: the forms as they act on data.")]
Layers = Annotated[str | None, typer.Option(help="Layers to read, such as 0-5 or 0,3,7.")]
HeadCount = Annotated[int | None, typer.Option(help="Number of heads, for a bare file without config.json.")]
Query = Annotated[str | None, typer.Option(help="Name of the query weights, with {layer} in it, of an unknown family.")]
Key = Annotated[str | None, typer.Option(help="Name of the key weights, likewise.")]
Config = Annotated[Path | None, typer.Option(help="A config.json that does not lie beside the weights.")]
Json = Annotated[Path | None, typer.Option(help="Write every figure to this JSON file.")]
Csv = Annotated[Path | None, typer.Option(help="Write one line a head to this CSV file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No tables and no progress; errors are still told.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
Tokens = Annotated[int, typer.Option(min=2, help="With --text: how many tokens to run at most.")]
Count = Annotated[int, typer.Option(min=0, help="Describe this many directions of each head by their tokens.")]
Length = Annotated[int, typer.Option(min=2, help="With --text: the length of a window in tokens.")]


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
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a .safetensors, .bin, .pt or .gguf file, or a hub model (org/name)."),
    ] = None,
    text: Text = None,
    layers: Layers = None,
    heads: HeadCount = None,
    query: Query = None,
    key: Key = None,
    config: Config = None,
    json: Json = None,
    csv: Csv = None,
    quiet: Quiet = False,
    force: Force = False,
    directions: Count = 0,
    tokens: Tokens = 20_000,
    length: Length = 128,
) -> None:
    """Show the geometry of every head: how much of it compares, points and follows the crowd.

    The checkpoint is read as it lies on disk, one layer at a time; the model is built only for --text. Without a
    model, the two that ship are shown side by side: one learned to find masked words, the other to tell the next.
    """
    _check_targets(json, csv, force)
    options: dict[str, Any] = {
        "heads": heads,
        "query": query,
        "key": key,
        "config": config,
        "tokens": tokens,
        "length": length,
    }
    options |= {"text": text, "layers": _numbers(layers), "directions": directions}
    reading = _shipped(quiet, options) if model is None else _watched_look(model, quiet, **options)
    _deliver(reading, json, csv, quiet)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="A model, as for look, or the JSON of a look.")],
    second: Annotated[str, typer.Argument(help="Another model, or a later step of the same.")],
    text: Text = None,
    heads: HeadCount = None,
    json: Json = None,
    csv: Csv = None,
    quiet: Quiet = False,
    force: Force = False,
    tokens: Tokens = 20_000,
    length: Length = 128,
) -> None:
    """Show two models, or two steps of one, side by side."""
    _check_targets(json, csv, force)
    options = {"text": text, "heads": heads, "tokens": tokens, "length": length}
    looks = [_any_look(source, quiet, **options) for source in (first, second)]
    _deliver(side_by_side(*_told_apart(looks, (first, second))), json, csv, quiet)


def _shipped(quiet: bool, options: dict[str, Any]) -> Comparison:
    """The two models that ship, on the text that ships unless another is given."""
    for name in ("heads", "query", "key", "config"):
        if options[name] is not None:
            raise ValueError(f"--{name} is about a model: name one")
    options["text"] = options["text"] or models.TEXT
    return side_by_side(*(_watched_look(str(m), quiet, **options) for m in (models.ENCODER, models.DECODER)))


def _any_look(source: str, quiet: bool, **options: Any) -> Look:
    if source.endswith(".json") and Path(source).is_file():
        reading = Reading.load(Path(source))
        if not isinstance(reading, Look):
            raise ValueError(f"{source} is a reading of kind {reading.kind!r}, not a look")
        return reading
    return _watched_look(source, quiet, **options)


def _told_apart(looks: list[Look], sources: Sequence[str]) -> list[Look]:
    """Looks of one name get those of their folders before it, as many as it takes."""
    parts = [Path(os.path.realpath(source)).parts for source in sources]
    if len({look.model["name"] for look in looks}) == len(looks) or len(set(parts)) < len(parts):
        return looks
    names = (["/".join(part[-depth:]) for part in parts] for depth in range(2, max(map(len, parts)) + 1))
    apart = next(found for found in names if len(set(found)) == len(found))
    return [replace(look, model={**look.model, "name": name}) for look, name in zip(looks, apart, strict=True)]


def _watched_look(source: str, quiet: bool, **options: Any) -> Look:
    with report.progress_bars(Console(stderr=True), wanted=not quiet) as progress:
        return look_at(source, progress=progress, workers=os.cpu_count() or 1, **options)


def _deliver(reading: Reading, json: Path | None, csv: Path | None, quiet: bool) -> None:
    texts: dict[str | Path, str | bytes] = {}  # all of them before the first is written
    if json is not None:
        texts[json] = reading.to_json() + "\n"
    if csv is not None:
        texts[csv] = report.csv_text(reading.records())
    report.write_all(texts)
    if not quiet:
        report.show(reading, Console())


def _check_targets(json: Path | None, csv: Path | None, force: bool) -> None:
    """Before any work: could both files be written?"""
    targets = [path for path in (json, csv) if path is not None]
    for path in targets:
        report.check_target(path, force)
    if len({os.path.realpath(path) for path in targets}) < len(targets):
        raise ValueError("--json and --csv name the same file")


def _numbers(layers: str | None) -> list[int] | None:
    """Layer numbers of a text such as 0-5 or 0,3,7-9."""
    if layers is None:
        return None
    chosen: list[int] = []
    for part in layers.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < 5 and int(first) <= int(last)):
            raise ValueError(f"--layers takes numbers below 10000 and ranges such as 0-5 or 0,3,7, got {layers!r}")
        chosen += range(int(first), int(last) + 1)
    return list(dict.fromkeys(chosen))


def main() -> None:
    """Run the command line; whatever goes wrong is one sentence on stderr and exit code 2.

    With KEYQUERY_DEBUG in the environment it is the traceback.
    """
    try:
        app()
    except SystemExit as stop:
        if stop.code == 130:  # what typer makes of an interrupt, without a word
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        if os.environ.get("KEYQUERY_DEBUG"):
            traceback.print_exc()
        else:
            print(f"keyquery: {_sentence(error)}", file=sys.stderr)
        sys.exit(2)


def _sentence(error: Exception) -> str:
    """An error in one line: those that are meant for users as they are, others with their type."""
    said = " ".join(str(error).split())
    if said and isinstance(error, (OSError, TypeError, ValueError, ImportError)):
        return said
    return f"{type(error).__name__}: {first_line(error)} (KEYQUERY_DEBUG=1 shows where)"
