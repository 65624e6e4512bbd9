"""`keyquery study kernels`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery.cli.options import (
    INT,
    Csv,
    Force,
    Json,
    Out,
    Picture,
    Quiet,
    Workers,
    deliver,
    targets,
    watching,
)

Texts = Annotated[
    Path | None,
    typer.Option(help="A text file, or a .tsv with a column `text`, packed or not; without, the tokens in --out."),
]
Seeds = Annotated[
    list[int] | None,
    typer.Option(
        metavar=INT, help="A seed; may be given several times. Without: three, and ten of the synthetic part."
    ),
]
Samples = Annotated[
    list[int] | None,
    typer.Option(
        metavar=INT,
        help="Sequences that the synthetic part learns from; may be given several times. Without: 16 to 1,024.",
    ),
]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="Break a training on the arena off after so many; --out goes on.")
]


def kernels(
    corpus: Texts = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="synthetic, language, init, or all.")] = "all",
    seed: Seeds = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each language model on all the text.")] = 800,
    few_steps: Annotated[int, typer.Option(min=1, help="Training steps on a small share of it.")] = 400,
    few: Annotated[float, typer.Option(help="That share.")] = 0.02,
    samples: Samples = None,
    width: Annotated[int, typer.Option(min=8, help="The language models' width.")] = 256,
    depth: Annotated[int, typer.Option(min=1, help="How many layers.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 128,
    vocabulary: Annotated[int, typer.Option(min=260, help="How many tokens the tokenizer learns.")] = 4096,
    workers: Workers = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto; of the language models.")] = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Does structure pay? Every kernel on two tasks of known truth and in language models, and three other starts.

    Minutes on a GPU with several --workers; the synthetic part takes minutes on any machine and needs no text.
    """
    from keyquery_studies.kernels.study import Plan, run

    files = targets(force, json=json, csv=csv, picture=picture)
    if picture is not None and part == "init":
        raise ValueError("--picture draws the parts synthetic and language, not init")
    sizes = {"width": width, "depth": depth, "length": length, "vocabulary": vocabulary}
    given: dict[str, Any] = {"part": part, "steps": steps, "few_steps": few_steps, "few": few, **sizes}
    given |= {"seeds": _once(seed), "trial_seeds": _once(seed)} if seed else {}
    given |= {"samples": _once(samples)} if samples else {}
    with watching(quiet) as progress:
        reading = run(corpus, out, Plan(**given), device, workers, force, progress)
    deliver(reading, files, quiet)


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    """A seed that is given twice is one seed."""
    return tuple(dict.fromkeys(values))
