"""`keyquery study kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery.cli.options import DEVICE, INT, STR, WORKERS, Out, Output, Workers, chosen, writes

SIZES = {  # defaults, and those of the part longer
    "steps": (2500, 48_000),
    "width": (96, 32),
    "depth": (3, 2),
    "length": (128, 32),
    "batch": (64, 32),
    "vocabulary": (2048, 512),
}
Texts = Annotated[
    Path | None,
    typer.Option(
        help="A text file, or a .tsv with a column `text`, plain or compressed. Default: the tokens in --out."
    ),
]
Seeds = Annotated[
    list[int] | None,
    typer.Option(metavar=INT, help="A seed; repeatable. Default: five seeds, ten for the synthetic part."),
]
Rates = Annotated[
    list[float] | None,
    typer.Option(
        metavar="<float>",
        help="Learning rate to try; repeatable. Default: 0.001 to 0.008; the grid grows while its best is at an"
        " edge, except in the part longer.",
    ),
]
Samples = Annotated[
    list[int] | None,
    typer.Option(
        metavar=INT,
        help="Number of training sequences in the synthetic part; repeatable. Default: 16 to 1,024.",
    ),
]


def _default(name: str) -> str:
    usual, longer = SIZES[name]
    return f"Default: {usual}, in the part longer {longer}."


@writes("json", "csv", "picture")
def kernels(
    corpus: Texts = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="synthetic, language, init, all of these, or longer.")] = "all",
    seed: Seeds = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Training steps per language model. {_default('steps')}")
    ] = None,
    doubled: Annotated[int, typer.Option(min=0, help="Seeds that also train for twice as many steps.")] = 2,
    rate: Rates = None,
    few: Annotated[float, typer.Option(help="Small data share: fraction of the text to train on.")] = 0.02,
    samples: Samples = None,
    width: Annotated[int | None, typer.Option(min=8, help=f"Width of the language models. {_default('width')}")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help=f"Number of layers. {_default('depth')}")] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(metavar=STR, help="In the part longer: masked or next token; repeatable. Default: both."),
    ] = None,
    positions: Annotated[
        list[str] | None,
        typer.Option(metavar=STR, help="In the part longer: learned or RoPE; repeatable. Default: both."),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(metavar="<float>", help="In the part longer: fraction of the text; repeatable. Default: 1."),
    ] = None,
    length: Annotated[int | None, typer.Option(min=2, help=f"Tokens per window. {_default('length')}")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=f"Windows per step. {_default('batch')}")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=260, help=f"Vocabulary size of the trained tokenizer. {_default('vocabulary')}")
    ] = None,
    workers: Workers = WORKERS,
    device: Annotated[str, typer.Option(help="Device of the language models: cpu, cuda, or auto.")] = DEVICE,
    *,
    output: Output,
) -> None:
    """Does kernel structure pay? Compare all kernels on two synthetic tasks and in language models.

    Every language model has its own learning rate, and a symmetric start as control. The part longer trains all arms
    side by side, at all rates with all seeds, for half of the --steps and for all of them. Half an hour on a large GPU
    with 16 --workers; the synthetic part takes minutes on any machine and needs no text.
    """
    from keyquery_studies.kernels.study import Plan, run

    if "picture" in output.files and part == "init":
        raise ValueError("--picture shows the parts synthetic, language and longer, not init")
    if part != "longer" and (objective or positions or share):
        raise ValueError(f"--objective, --positions and --share are of the part longer, not of {part}")
    given = {"steps": steps, "width": width, "depth": depth, "length": length, "batch": batch, "vocabulary": vocabulary}
    sizes = {name: SIZES[name][part == "longer"] if value is None else value for name, value in given.items()}
    options: dict[str, Any] = {"part": part, "doubled": doubled, "few": few, **sizes}
    options |= chosen(seeds=seed, trial_seeds=seed, samples=samples, rates=rate)
    options |= chosen(objectives=objective, positions=positions, shares=share)
    with output.watching() as progress:
        reading = run(corpus, out, Plan(**options), device, workers, output.force, progress)
    output.deliver(reading)
