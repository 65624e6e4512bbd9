"""A study: one claim, as a plan whose jobs are run, the reading that their rows make, and the command for both.

A study is a frozen dataclass: its fields are what can be varied, and the options of its command. It says what its
`jobs` are; running them beside one another, keeping each result and resuming is the same for all. Its reading derives
what the page of the study says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import partial
from inspect import Parameter, Signature, cleandoc
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from keyquery.kinds import Kind
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.rows import FORMER
from keyquery_studies.common.runner import Job, device_name, run_jobs, study_folder
from keyquery_studies.common.store import result_name
from keyquery_studies.registry import KINDS

Rows = dict[str, Any]  # of each part of a reading
Train = Callable[[Sequence[Job]], list[dict[str, Any]]]


def option(default: Any = MISSING, help: str = "", name: str | None = None, **details: Any) -> Any:
    """A field of a study that is an option of its command; a tuple is one that may be repeated.

    `name` is that of the option (default: the field's), `least` the lowest number it takes; with `argument` it has no
    name on the command line.
    """
    return field(default=default, metadata={"help": help, "name": name, **details})


@dataclass(frozen=True, kw_only=True)
class StudyReading(Reading, kind="study"):
    """The rows of a study, by part, and what is derived from them. It is shown by the module that defines it."""

    former = FORMER

    def __init_subclass__(cls, kind: str, **rest: Any) -> None:
        super().__init_subclass__(kind, **rest)
        KINDS.setdefault(kind, Kind(cls.__module__, cls.__module__))

    def records(self) -> list[dict[str, Any]]:
        """All rows of all parts; curves and other nested values are in the JSON only."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "provenance"}
        name = {part: {"part": part} if len(parts) > 1 else {} for part in parts}
        return [
            {**name[part], **{key: value for key, value in row.items() if not isinstance(value, (list, dict))}}
            for part, rows in parts.items()
            for row in rows
        ]

    def summary(self) -> list[dict[str, Any]]:
        """What the study found, in few rows."""
        return self.records()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A job whose settings are its fields; equal settings are computed once."""

    def settings(self) -> dict[str, Any]:
        """What its result depends on."""
        return asdict(self)

    @property
    def name(self) -> str:
        """The name of its result file."""
        settings = self.settings()
        words = [Path(value).name for value in settings.values() if isinstance(value, str)] or [
            type(self).__name__.lower()
        ]
        return result_name((*words, settings.get("seed", "")), {**settings, "trial": type(self).__name__})

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Its row; `folder` holds what all jobs of the study share."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Study:
    """A claim that can be run again."""

    result: ClassVar[type[Reading]]  # its fields are the parts of the study

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """Check the options, keep in `folder` what the jobs share, and return facts of it for the provenance."""
        return {}

    def jobs(self, facts: Mapping[str, Any]) -> Mapping[str, Sequence[Job]]:
        """The jobs of each part."""
        raise NotImplementedError

    def rows(self, facts: Mapping[str, Any], train: Train) -> Rows:
        """The rows of each part; a study in which some jobs depend on others' results trains them one after another."""
        jobs = self.jobs(facts)
        trained = iter(train([job for part in jobs.values() for job in part]))
        return {name: list(islice(trained, len(part))) for name, part in jobs.items()}

    def run(
        self,
        out: str | Path | None = None,
        device: str = "auto",
        workers: int = 1,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Any:
        """Run all jobs, and return the reading.

        With a folder `out`, every result is kept there: nothing is computed twice, and an interrupted study is resumed.
        `workers` processes share the device; `force` replaces data of other settings in `out`.
        """
        check_count("workers", workers)
        chosen = pick_device(device)
        with study_folder(out) as folder:
            facts = self.prepare(folder, force)
            train = partial(run_jobs, folder=folder, device=chosen, workers=workers, progress=progress)
            rows = self.rows(facts, train)
        plan = {name: value.name if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return self.result(**rows, provenance=provenance(plan=plan, device=device_name(chosen), **facts))

    @classmethod
    def command(cls) -> Callable[..., None]:
        """The study as a function for typer: an option per field, those of `run`, and where the results go."""
        import typer

        from keyquery.cli.options import DEVICE, WORKERS, Device, Out, Output, Workers, writes

        hints, named = get_type_hints(cls), {f.metadata.get("name") or f.name: f for f in fields(cls)}
        parameters = {name: _option(name, f, hints[f.name], typer) for name, f in named.items()}
        parameters |= {"out": (Out, None), "workers": (Workers, WORKERS), "device": (Device, DEVICE)}

        def command(output: Output, out: Any, workers: int, device: str, **values: Any) -> None:
            given = {f.name: _given(values[name]) for name, f in named.items() if values[name] is not None}
            with output.watching() as progress:
                reading = cls(**given).run(out, device, workers, output.force, progress)
            output.deliver(reading)

        command.__doc__, command.__name__ = cleandoc(cls.__doc__ or ""), cls.__name__.lower()
        command.__annotations__ = {name: hint for name, (hint, _) in parameters.items()} | {"output": Output}
        keyword = Parameter.KEYWORD_ONLY
        command.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, keyword, default=default) for name, (_, default) in parameters.items()]
            + [Parameter("output", keyword)]
        )
        pictures = ["picture"] if getattr(sys.modules[cls.__module__], "FIGURES", None) else []
        return writes("json", "csv", *pictures)(command)

    @classmethod
    def main(cls) -> None:
        """Run the study from the command line of a script of its own."""
        import typer

        typer.run(cls.command())


def _option(name: str, of: Field[Any], hint: Any, typer: Any) -> tuple[Any, Any]:
    """The annotated type of a field as an option, and its default; None where the field's default is not shown."""
    repeated, known = get_origin(hint) is tuple, of.metadata
    kind, text = get_args(hint)[0] if repeated else hint, known.get("help", "")
    if known.get("argument"):
        return Annotated[list[kind], typer.Argument(help=text)], Parameter.empty  # type: ignore[valid-type]
    if repeated and of.default is not MISSING:
        shown = ", ".join(map(str, of.default)) or "all"
        text += f" Repeatable. Default: {shown}."
    metavar = f"<{kind.__name__.lower()}>" if repeated else None
    flag = f"--{name.replace('_', '-')}"
    settings = typer.Option(flag, help=text, min=known.get("least"), metavar=metavar)
    if repeated:
        default = None if of.default is not MISSING else Parameter.empty
        return Annotated[list[kind] | None if default is None else list[kind], settings], default  # type: ignore[valid-type]
    return Annotated[hint, settings], Parameter.empty if of.default is MISSING else of.default


def _given(value: Any) -> Any:
    """A repeated option as a tuple without duplicates."""
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else value
