"""`keyquery study primal`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery.cli.options import (
    STR,
    Csv,
    Device,
    FiveSeeds,
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

Attentions = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="primal, primal+ or general; may be given several times. Without: all. Speed is of all, side by side.",
    ),
]
ArenaData = Annotated[
    Path | None,
    typer.Option(
        metavar="<dir>", help="A folder with .ts files, a .tsv with split, label and text, an .npz of images."
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(metavar=STR, help="listops, text, image or pathfinder; may be given several times. Without: all."),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(metavar=STR, help="A set of series; may be given several times. Without: all in --data."),
]
Share = Annotated[
    float | None,
    typer.Option(help="Share of the arena's steps to run. Without: all of ListOps and Text, a fifth of the others."),
]
Examples = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Examples to generate and train on; a tenth more to choose by, and to test on. Without: as published.",
    ),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Steps of a whole training on the arena. Without: as published.")
]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="Break a training on the arena off after so many; --out goes on.")
]


def primal(
    data: ArenaData = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="series, ablation, arena, speed, or all.")] = "all",
    task: Tasks = None,
    attention: Attentions = None,
    dataset: Datasets = None,
    seed: FiveSeeds = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of a training on series.")] = 100,
    width: Annotated[int, typer.Option(min=8, help="Width of the networks on series.")] = 512,
    share: Share = None,
    steps: Steps = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences a step on the arena. Without: as published.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="published: a share is a run cut short; shortened: a whole one.")] = (
        "published"
    ),
    start: Annotated[str, typer.Option(help="How primal layers start: published, or default, the layer's own.")] = (
        "published"
    ),
    examples: Examples = None,
    minutes: Minutes = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each step is timed.")] = 7,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """What is Primal-Attention worth? Against fused softmax on sets of series and on the Long Range Arena.

    ListOps and Pathfinder are generated; Text and Image are made of files in --data. Minutes to hours on a GPU; with
    --out it may be broken off at any time, or by --minutes, and goes on.
    """
    from keyquery_studies.primal.study import Plan, run

    files = targets(force, json=json, csv=csv, picture=picture)
    if picture is not None and part == "ablation":
        raise ValueError("--picture draws the parts series, arena and speed, not ablation")
    named = {"tasks": task, "attentions": attention, "datasets": dataset, "seeds": seed}
    given: dict[str, Any] = {name: tuple(values) for name, values in named.items() if values}
    given |= {"part": part, "epochs": epochs, "share": share, "steps": steps, "batch": batch, "schedule": schedule}
    given |= {"start": start, "width": width, "minutes": minutes, "repeats": repeats}
    if examples is not None:
        given["examples"] = (examples, -(-examples // 10), -(-examples // 10))
    with watching(quiet) as progress:
        reading = run(data, out, Plan(**given), device, workers, progress)
    deliver(reading, files, quiet)
