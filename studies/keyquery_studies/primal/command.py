"""`keyquery study primal`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, STR, WORKERS, Device, FiveSeeds, Out, Output, Workers, chosen, writes

Attentions = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="primal, primal+ or general; of the part text primal, released or general, or with the sampling of the "
        "other 'primal, sampling padding' and 'released, sampling real tokens'; repeatable. Default: all, of text the "
        "first three. The part speed always measures all.",
    ),
]
ArenaData = Annotated[
    Path | None,
    typer.Option(
        metavar="<dir>", help="A folder with .ts files, a .tsv with split, label and text, and an .npz of images."
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(metavar=STR, help="listops, text, image or pathfinder; repeatable. Default: all."),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(metavar=STR, help="A time-series data set; repeatable. Default: all in --data."),
]
Share = Annotated[
    float | None,
    typer.Option(
        help="Fraction of the published Long Range Arena steps to run. Default: 1 for ListOps and Text, else 0.2."
    ),
]
Examples = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of training examples to generate, plus 10 % each for validation and test. Default: as published.",
    ),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Steps of a full training run on the arena. Default: as published.")
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0, help="Stop a training run on the arena after this many minutes; with --out, it can be resumed."
    ),
]


@writes("json", "csv", "picture")
def primal(
    data: ArenaData = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="series, ablation, arena, speed, all of these, or text.")] = "all",
    task: Tasks = None,
    attention: Attentions = None,
    dataset: Datasets = None,
    seed: FiveSeeds = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per training run on time series.")] = 100,
    width: Annotated[int, typer.Option(min=8, help="Width of the networks for time series.")] = 512,
    share: Share = None,
    steps: Steps = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Batch size (sequences per step) on the arena. Default: as published.")
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            help="Learning-rate schedule of a --share: published cuts the full schedule short; shortened rescales it."
        ),
    ] = "published",
    start: Annotated[
        str, typer.Option(help="Initialisation of primal layers: published, or default (that of the layer itself).")
    ] = "published",
    examples: Examples = None,
    minutes: Minutes = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Bytes of a text in the part text, at most 4096. Default: 1024.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="Learning rate in the part text; repeatable, of which the best is used. Default: a grid."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timings per step.")] = 7,
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """What is Primal-Attention worth? Compare it with fused softmax on time series and the Long Range Arena.

    ListOps and Pathfinder are generated; Text and Image are built from files in --data. The part text trains softmax,
    our layer and a literal statement of the released one on shortened texts, each at its best rate. Minutes to hours on
    a GPU; with --out, a run that was interrupted, or stopped by --minutes, can be resumed.
    """
    from keyquery_studies.primal.study import Plan, run

    if "picture" in output.files and part in ("ablation", "text"):
        raise ValueError(f"--picture shows the parts series, arena and speed, not {part}")
    options = chosen(tasks=task, attentions=attention, datasets=dataset, seeds=seed, rates=rate)
    options |= {"part": part, "epochs": epochs, "share": share, "steps": steps, "batch": batch, "schedule": schedule}
    options |= {"start": start, "width": width, "minutes": minutes, "repeats": repeats, "length": length}
    if examples is not None:
        options["examples"] = (examples, -(-examples // 10), -(-examples // 10))
    with output.watching() as progress:
        reading = run(data, out, Plan(**options), device, workers, progress)
    output.deliver(reading)
