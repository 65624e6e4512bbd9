"""`keyquery depth`, and the study of the law that it goes by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery.cli.options import INT, Csv, Device, Force, Json, Out, Picture, Quiet, Workers, deliver, targets, watching
from keyquery.instruments import depth as advise

Rates = Annotated[
    list[float] | None,
    typer.Option(
        metavar="<float>", help="A learning rate, at width 128; may be given several times. Without: 1e-3, 2e-3, 4e-3."
    ),
]


def depth(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to judge: a folder, a file or a hub model, as for look. Only its shapes are read."
        ),
    ] = None,
    params: Annotated[
        float | None, typer.Option(help="A budget: parameters without embeddings, such as 1.3e9.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="A width; with --layers, a shape to judge.")] = None,
    layers: Annotated[int | None, typer.Option(help="A number of layers; alone, for the law's width at it.")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="How many tokens there are, where that is few: it bounds the width that is used.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="How many heads the shape has, for the bounds of its separation rank.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="The size of a head, to which the width is rounded.")] = None,
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """How deep is a Transformer to be? The law ln d = 5.039 + 0.0555·L of a budget, or about a shape.

    Examples: `keyquery depth --params 1.3e9` · `keyquery depth --width 2048 --layers 24` ·
    `keyquery depth path/to/model --picture plane.svg`

    The law was fitted on decoders of 6 to 48 layers ("Limits to Depth Efficiencies of Self-Attention", 2020); not all
    who looked found the shape to matter.
    """
    files = targets(force, json=json, csv=csv, picture=picture)
    if model is None and params is None and width is None and layers is None:
        raise ValueError("give a budget (--params 1.3e9), a shape (--width 2048 --layers 24), or a model")
    options: dict[str, Any] = {"model": model, "vocabulary": vocabulary, "heads": heads, "head_dim": head_dim}
    deliver(advise(params, width, layers, **options), files, quiet)


def study_depth(
    data: Annotated[
        Path | None,
        typer.Option(help="A text file, packed or not, or a folder with one; without, the tokens in --out."),
    ] = None,
    out: Out = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            metavar=INT,
            help="Parameters without embeddings; may be given several times. Without: .33, 1 and 4 million.",
        ),
    ] = None,
    layers: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="A depth; may be given several times. Without: eight from 1 to 24."),
    ] = None,
    rate: Rates = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="A seed; may be given several times; the first tries all rates. Without: two."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model, of 128 windows.")] = 1000,
    length: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 128,
    vocabulary: Annotated[int, typer.Option(min=260, help="How many tokens the tokenizer learns.")] = 1024,
    minutes: Annotated[float | None, typer.Option(min=0, help="Break off after so many; --out goes on.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile each block by torch.compile.")] = False,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Which depth is best for a number of parameters, and does it grow with them? Beside the law of `keyquery depth`.

    Decoders of three budgets and eight depths read the same text, each with the learning rate that suits it; and what
    their heads become is told. Planned for less than 25 minutes of one H200 with 16 --workers; with --out it may be
    broken off, and goes on.
    """
    from keyquery.studies.depth import Plan, depths

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"budgets": budget, "depths": layers, "rates": rate, "seeds": seed}
    given: dict[str, Any] = {name: tuple(values) for name, values in named.items() if values}
    given |= {"steps": steps, "length": length, "vocabulary": vocabulary}
    with watching(quiet) as progress:
        reading = depths(data, out, Plan(**given), device, workers, minutes, compiled, force, progress)
    deliver(reading, files, quiet)
