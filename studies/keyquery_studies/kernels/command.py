"""`keyquery study kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery.cli.options import DEVICE, INT, WORKERS, Out, Output, Vocabulary, WindowLength, Workers, chosen, writes

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
        help="Learning rate to try; repeatable. Default: 0.001 to 0.008. The grid grows while its best is at an edge.",
    ),
]
Samples = Annotated[
    list[int] | None,
    typer.Option(
        metavar=INT,
        help="Number of training sequences in the synthetic part; repeatable. Default: 16 to 1,024.",
    ),
]


@writes("json", "csv", "picture")
def kernels(
    corpus: Texts = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="synthetic, language, init, all of these, or longer.")] = "all",
    seed: Seeds = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per language model.")] = 2500,
    doubled: Annotated[int, typer.Option(min=0, help="Seeds that also train for twice as many steps.")] = 2,
    rate: Rates = None,
    few: Annotated[float, typer.Option(help="Small data share: fraction of the text to train on.")] = 0.02,
    samples: Samples = None,
    width: Annotated[int, typer.Option(min=8, help="Width of the language models.")] = 96,
    depth: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 3,
    objective: Annotated[
        list[str] | None, typer.Option(help="In the part longer: masked or next token; repeatable. Default: both.")
    ] = None,
    positions: Annotated[
        list[str] | None, typer.Option(help="In the part longer: learned or RoPE; repeatable. Default: both.")
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(metavar="<float>", help="In the part longer: fraction of the text; repeatable. Default: 1."),
    ] = None,
    length: WindowLength = 128,
    batch: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 64,
    vocabulary: Vocabulary = 2048,
    workers: Workers = WORKERS,
    device: Annotated[str, typer.Option(help="Device of the language models: cpu, cuda, or auto.")] = DEVICE,
    *,
    output: Output,
) -> None:
    """Does kernel structure pay? Compare all kernels on two synthetic tasks and in language models.

    Every language model has its own learning rate, and a symmetric start as control. The part longer trains all arms
    side by side, at all rates with all seeds, for half of the --steps and for all of them; its --workers share a GPU
    best under MPS. Half an hour on a large GPU with 16 --workers; the synthetic part takes minutes on any machine and
    needs no text.
    """
    from keyquery_studies.kernels.study import Plan, run

    if "picture" in output.files and part in ("init", "longer"):
        raise ValueError(f"--picture shows the parts synthetic and language, not {part}")
    sizes = {"width": width, "depth": depth, "length": length, "vocabulary": vocabulary, "batch": batch}
    options: dict[str, Any] = {"part": part, "steps": steps, "doubled": doubled, "few": few, **sizes}
    options |= chosen(seeds=seed, trial_seeds=seed, samples=samples, rates=rate)
    options |= chosen(objectives=objective, positions=positions, shares=share)
    with output.watching() as progress:
        reading = run(corpus, out, Plan(**options), device, workers, output.force, progress)
    output.deliver(reading)
