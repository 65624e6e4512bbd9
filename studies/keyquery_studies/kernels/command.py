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
    typer.Option(metavar=INT, help="A seed; repeatable. Default: three seeds, ten for the synthetic part."),
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
    part: Annotated[str, typer.Option(help="synthetic, language, init, or all.")] = "all",
    seed: Seeds = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per language model on the full text.")] = 800,
    few_steps: Annotated[int, typer.Option(min=1, help="Training steps on the small data share.")] = 400,
    few: Annotated[float, typer.Option(help="Small data share: fraction of the text to train on.")] = 0.02,
    samples: Samples = None,
    width: Annotated[int, typer.Option(min=8, help="Width of the language models.")] = 256,
    depth: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    length: WindowLength = 128,
    vocabulary: Vocabulary = 4096,
    workers: Workers = WORKERS,
    device: Annotated[str, typer.Option(help="Device of the language models: cpu, cuda, or auto.")] = DEVICE,
    *,
    output: Output,
) -> None:
    """Does kernel structure pay? Compare all kernels on two synthetic tasks and in language models.

    Also compares three other initialisations. Minutes on a GPU with several --workers; the synthetic part takes minutes
    on any machine and needs no text.
    """
    from keyquery_studies.kernels.study import Plan, run

    if "picture" in output.files and part == "init":
        raise ValueError("--picture shows the parts synthetic and language, not init")
    sizes = {"width": width, "depth": depth, "length": length, "vocabulary": vocabulary}
    options: dict[str, Any] = {"part": part, "steps": steps, "few_steps": few_steps, "few": few, **sizes}
    options |= chosen(seeds=seed, trial_seeds=seed, samples=samples)
    with output.watching() as progress:
        reading = run(corpus, out, Plan(**options), device, workers, output.force, progress)
    output.deliver(reading)
