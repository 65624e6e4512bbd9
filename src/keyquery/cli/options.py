"""Options that commands share, each declared once, and the functions that write and print results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.text import Text

from keyquery import pages
from keyquery.checkpoints.custom import LAYOUTS
from keyquery.pages import terminal
from keyquery.pages.terminal import plain_console
from keyquery.reading import Reading
from keyquery.support.devices import DTYPES
from keyquery.support.files import check_target, csv_text, write_all
from keyquery.support.printable import printable
from keyquery.support.progress import Progress

OUTPUT, CHECKPOINT, DATA, RUN = "Output", "Unknown architectures, adapters", "Data", "Device"  # groups of the help
Json = Annotated[
    Path | None,
    typer.Option(help="Write all results to this .json or .json.xz file.", rich_help_panel=OUTPUT),
]
Csv = Annotated[
    Path | None, typer.Option(help="Write the results as a table to this CSV file.", rich_help_panel=OUTPUT)
]
Html = Annotated[
    Path | None,
    typer.Option(help="Write a self-contained page to this HTML file; it opens offline.", rich_help_panel=OUTPUT),
]
Picture = Annotated[
    Path | None, typer.Option(help="Write the figure to this .svg, .png or .pdf file.", rich_help_panel=OUTPUT)
]
FILES = {"json": Json, "csv": Csv, "html": Html, "picture": Picture}  # what `writes` can declare
Ids = Annotated[
    Path | None,
    typer.Option(
        help="Instead of --text: a file of integer token ids, one sequence per line; sequences are not cut.",
        rich_help_panel=DATA,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="Print no tables and no progress; errors are still shown.", rich_help_panel=OUTPUT
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.", rich_help_panel=OUTPUT)]
# How to read a checkpoint whose layout is not recognised.
HeadCount = Annotated[
    int | None,
    typer.Option(
        "--num-heads",
        help="Number of heads, for a bare file without config.json. Default: from the config.",
        rich_help_panel=CHECKPOINT,
    ),
]
Query = Annotated[
    str | None,
    typer.Option(
        help="Name of the query weights of an unknown architecture, such as blocks.{layer}.attn.q.weight. Default: "
        "known from the architecture.",
        rich_help_panel=CHECKPOINT,
    ),
]
Key = Annotated[
    str | None,
    typer.Option(help="Name of the key weights; not needed with a fused --layout.", rich_help_panel=CHECKPOINT),
]
Layout = Annotated[
    str | None,
    typer.Option(
        help="With --query: how the weights are stored; d is the model's width, r a head's. "
        + "; ".join(f"{name}: {how}" for name, (how, _) in LAYOUTS.items())
        + ". Default: linear.",
        rich_help_panel=CHECKPOINT,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="A config.json that is not in the folder of the weights. Default: the one beside them.",
        rich_help_panel=CHECKPOINT,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.", rich_help_panel=RUN)]
DEVICE = "auto"
Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"Run the model in {', '.join(DTYPES)}. Default: as its weights are stored.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
Out = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder for results; a later run resumes and skips finished work.")
]
Workers = Annotated[int, typer.Option(min=1, help="Number of training runs that share the device.")]
WORKERS = 1
Vocabulary = Annotated[int, typer.Option(min=260, help="Vocabulary size of the trained tokenizer.")]
WindowLength = Annotated[int, typer.Option(min=2, help="Tokens per window.")]
INT, STR, PATH = "<int>", "<str>", "<path>"  # metavars of options that may be repeated, instead of <list[int]>
# Seeds of a study, named by how many are the default.
ThreeSeeds = Annotated[list[int] | None, typer.Option(metavar=INT, help="A seed; repeatable. Default: three seeds.")]
FiveSeeds = Annotated[list[int] | None, typer.Option(metavar=INT, help="A seed; repeatable. Default: five seeds.")]


def default_of(function: Callable[..., Any], name: str) -> Any:
    """The default of a function's parameter, for the option of the same meaning."""
    return inspect.signature(function).parameters[name].default


def chosen(**options: Iterable[Any] | None) -> dict[str, Any]:
    """The repeatable options that were given, as tuples without duplicates; the others keep the function's default."""
    return {name: tuple(dict.fromkeys(values)) for name, values in options.items() if values}


def watching(quiet: bool) -> AbstractContextManager[Progress]:
    """Progress bars on standard error, or none if `quiet`."""
    return terminal.progress_bars(plain_console(stderr=True), wanted=not quiet)


def deliver(
    reading: Reading,
    targets: dict[str, Path],
    quiet: bool,
    page_of: Reading | None = None,
    others: Mapping[str, Callable[[], str | bytes]] | None = None,
) -> None:
    """Write the requested files, all or none, and print the reading."""
    makers: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: reading.content(targets["json"]),
        "csv": lambda: csv_text(reading.records()),
        "html": lambda: pages.page(page_of or reading),
        "picture": lambda: pages.picture_bytes(targets["picture"], reading),
        **(others or {}),
    }
    write_all({path: makers[name]() for name, path in targets.items()})  # all contents are made before any is written
    if not quiet:
        terminal.show(reading, plain_console())
        for path in targets.values():
            written(path)


def written(path: Path) -> None:
    """Print the path of a file that was written."""
    plain_console().print(Text(f"Written: {printable(str(path))}"), soft_wrap=True)


def targets(force: bool, **paths: Path | None) -> dict[str, Path]:
    """The requested files, by option name; checked to be writable before any work starts."""
    requested = {name: path for name, path in paths.items() if path is not None}
    for path in requested.values():
        check_target(path, force)
    if "picture" in requested:
        pages.check_picture(requested["picture"])
    names: dict[Path, str] = {}
    for name, path in requested.items():
        if (other := names.setdefault(path.resolve(), name)) != name:
            raise ValueError(f"--{other} and --{name} name the same file")
    return requested


@dataclass(frozen=True)
class Output:
    """Where the results of a command go: files by option name, checked when created, and the terminal."""

    files: dict[str, Path]
    quiet: bool
    force: bool

    def also(self, **paths: Path | None) -> Output:
        """The same with further files, which only one command writes."""
        return replace(self, files=targets(self.force, **paths, **self.files))

    def watching(self) -> AbstractContextManager[Progress]:
        """Progress bars, unless quiet."""
        return watching(self.quiet)

    def deliver(self, reading: Reading, **options: Any) -> None:
        """Write the files and print the reading; `options` as of `deliver`."""
        deliver(reading, self.files, self.quiet, **options)


def writes(*kinds: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare which files a command can write.

    Its parameter `output` becomes one option per kind (of `FILES`), then --quiet and --force. Paths are checked before
    the command starts.
    """
    options: dict[str, tuple[Any, Any]] = {kind: (FILES[kind], None) for kind in kinds}
    options |= {"quiet": (Quiet, False), "force": (Force, False)}

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            shared = {name: values.pop(name) for name in options}
            quiet, force = shared.pop("quiet"), shared.pop("force")
            command(**values, output=Output(targets(force, **shared), quiet, force))

        hints = get_type_hints(command, include_extras=True)
        own = inspect.signature(command).parameters.values()
        parameters = [each.replace(annotation=hints[each.name]) for each in own if each.name != "output"]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return declare


def numbers_of(option: str, text: str) -> list[int]:
    """Parse numbers and ranges such as 0-5 or 0,3,7-9."""
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < 6 and int(first) <= int(last)):
            raise ValueError(f"{option} takes numbers below 100000 and ranges such as 0-5 or 0,3,7, got {text!r}")
        chosen += range(int(first), int(last) + 1)
    return list(dict.fromkeys(chosen))
