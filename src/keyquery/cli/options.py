"""Options that commands share, each declared once, and the functions that write and print results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

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
from keyquery.support.progress import Progress, bars

OUTPUT, CHECKPOINT, DATA, RUN = "Output", "Unknown architectures, adapters", "Data", "Device"  # groups of the help
REQUIRED = inspect.Parameter.empty
FROM_FUNCTION = object()  # the default of the function that a command calls


class Option(NamedTuple):
    """An option or argument of a command: typer's annotation, and the default."""

    annotation: Any
    default: Any


def option(
    kind: Any, text: str, default: Any = FROM_FUNCTION, *, name: str = "", panel: str | None = None, **settings: Any
) -> Option:
    """An option with its help; of kind `… | None` the default is None. `settings` are those of `typer.Option`."""
    settings |= {"help": text, "rich_help_panel": panel}
    default = None if default is FROM_FUNCTION and NoneType in get_args(kind) else default
    return Option(Annotated[kind, typer.Option(*name.split(), **settings)], default)


def argument(kind: Any, text: str, **settings: Any) -> Option:
    """An argument with its help, required unless it is of kind `… | None`."""
    return Option(
        Annotated[kind, typer.Argument(help=text, **settings)], None if NoneType in get_args(kind) else REQUIRED
    )


FILES = {  # what a command can write
    "json": option(Path | None, "Write all results to this .json or .json.xz file.", panel=OUTPUT),
    "csv": option(Path | None, "Write the results as a table to this CSV file.", panel=OUTPUT),
    "html": option(Path | None, "Write a self-contained page to this HTML file; it opens offline.", panel=OUTPUT),
    "picture": option(Path | None, "Write the figure to this .svg, .png or .pdf file.", panel=OUTPUT),
}
PRINTED = {
    "quiet": option(
        bool, "Print no tables and no progress; errors are still shown.", False, name="--quiet -q", panel=OUTPUT
    ),
    "force": option(bool, "Overwrite existing files.", False, name="--force", panel=OUTPUT),
}
MODEL = argument(str | None, "A folder or a .gguf file. Default: the bundled decoder.")
TEXT = option(
    Path | None, "A text file to run the model on (-: standard input). Default: the bundled text.", panel=DATA
)
IDS = option(
    Path | None,
    "Instead of --text: a file of integer token ids, one sequence per line; sequences are not cut.",
    panel=DATA,
)
HEAD_COUNT = option(
    int | None,
    "Number of heads, for a bare file without config.json. Default: from the config.",
    name="--num-heads",
    panel=CHECKPOINT,
)
READING = {  # how to read a checkpoint whose layout is not recognised
    "heads": HEAD_COUNT,
    "query": option(
        str | None,
        "Name of the query weights of an unknown architecture, such as blocks.{layer}.attn.q.weight. Default: "
        "known from the architecture.",
        panel=CHECKPOINT,
    ),
    "key": option(str | None, "Name of the key weights; not needed with a fused --layout.", panel=CHECKPOINT),
    "layout": option(
        str | None,
        "With --query: how the weights are stored; d is the model's width, r a head's. "
        + "; ".join(f"{name}: {how}" for name, (how, _) in LAYOUTS.items())
        + ". Default: linear.",
        panel=CHECKPOINT,
    ),
    "config": option(
        Path | None,
        "A config.json that is not in the folder of the weights. Default: the one beside them.",
        panel=CHECKPOINT,
    ),
}
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.", rich_help_panel=RUN)]
DEVICE = "auto"
RUNNING = {  # where and how a model runs
    "device": Option(Device, DEVICE),
    "dtype": option(
        str | None,
        f"Run the model in {', '.join(DTYPES)}. Default: as its weights are stored.",
        show_default=False,
        panel=RUN,
    ),
}
# Options of studies.
Out = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder for results; a later run resumes and skips finished work.")
]
Workers = Annotated[int, typer.Option(min=1, help="Number of training runs that share the device.")]
WORKERS = 1
Vocabulary = Annotated[int, typer.Option(min=260, help="Vocabulary size of the trained tokenizer.")]
INT, STR, PATH = "<int>", "<str>", "<path>"  # metavars of options that may be repeated, instead of <list[int]>
ThreeSeeds = Annotated[list[int] | None, typer.Option(metavar=INT, help="A seed; repeatable. Default: three seeds.")]


def default_of(function: Callable[..., Any], name: str) -> Any:
    """The default of a function's parameter, for the option of the same meaning."""
    return inspect.signature(function).parameters[name].default


def chosen(**options: Iterable[Any] | None) -> dict[str, Any]:
    """The repeatable options that were given, as tuples without duplicates; the others keep the function's default."""
    return {name: tuple(dict.fromkeys(values)) for name, values in options.items() if values}


def written(path: Path) -> None:
    """Print the path of a file that was written."""
    plain_console().print(Text(f"Written: {printable(str(path))}"), soft_wrap=True)


def targets(force: bool, **paths: Path | None) -> dict[str, Path]:
    """The requested files, by option name; checked to be writable before any work starts."""
    requested = {name: path for name, path in paths.items() if path is not None}
    names: dict[Path, str] = {}
    for name, path in requested.items():
        check_target(path, force)
        if name == "picture":
            pages.check_picture(path)
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
        """Progress bars on standard error, unless quiet."""
        return bars(wanted=not self.quiet, logged=False)

    def deliver(
        self,
        reading: Reading,
        page_of: Reading | None = None,
        others: Mapping[str, Callable[[], str | bytes]] | None = None,
    ) -> None:
        """Write the requested files, all or none, and print the reading."""
        files = self.files
        makers: dict[str, Callable[[], str | bytes]] = {
            "json": lambda: reading.content(files["json"]),
            "csv": lambda: csv_text(reading.records()),
            "html": lambda: pages.page(page_of or reading),
            "picture": lambda: pages.picture_bytes(files["picture"], reading),
            **(others or {}),
        }
        write_all({path: makers[name]() for name, path in files.items()})  # all are made before any is written
        if not self.quiet:
            terminal.show(reading, plain_console())
            for path in files.values():
                written(path)


def command(
    *kinds: str, calls: Callable[..., Any] | None = None, **options: Option
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the options of a command, and which files (of `FILES`) it can write.

    An option without a default has that of the parameter of `calls` of its name. A parameter `output` of the command
    becomes one option per kind of file, then --quiet and --force; paths are checked before it starts.
    """

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        own = inspect.signature(function).parameters
        declared = options or {name: Option(hints[name], own[name].default) for name in own if name != "output"}
        shared = {kind: FILES[kind] for kind in kinds} | PRINTED if "output" in own else {}

        @wraps(function)
        def run(**values: Any) -> None:
            if shared:
                files = {kind: values.pop(kind) for kind in kinds}
                quiet, force = values.pop("quiet"), values.pop("force")
                values["output"] = Output(targets(force, **files), quiet, force)
            function(**values)

        parameters = []
        for name, (annotation, default) in {**declared, **shared}.items():
            default = default_of(calls, name) if default is FROM_FUNCTION and calls else default
            parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            parameters.append(parameter)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return declare


writes = command  # of studies, which declare their options by annotations


def numbers_of(option: str, text: str) -> list[int]:
    """Parse numbers and ranges such as 0-5 or 0,3,7-9."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"{option} takes numbers below 100000 and ranges such as 0-5 or 0,3,7, got {text!r}")
        numbers += range(first, last + 1)
    return list(dict.fromkeys(numbers))
