"""`keyquery study mask`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from keyquery.cli.options import DEVICE, INT, WORKERS, Out, Output, Vocabulary, WindowLength, Workers, chosen, writes
from keyquery_studies.kernels.command import Rates, Texts

Seeds = Annotated[list[int] | None, typer.Option(metavar=INT, help="A seed; repeatable. Default: five seeds.")]
Windows = Annotated[
    list[int] | None,
    typer.Option(metavar=INT, help="Window length at which heads are measured; repeatable. Default: 32, 64, 128."),
]


@writes("json", "csv", "picture")
def mask(
    corpus: Texts = None,
    out: Out = None,
    seed: Seeds = None,
    rate: Rates = None,
    window: Windows = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per model.")] = 2500,
    width: Annotated[int, typer.Option(min=8, help="Width of the models.")] = 96,
    depth: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 3,
    length: WindowLength = 128,
    batch: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 64,
    vocabulary: Vocabulary = 2048,
    workers: Workers = WORKERS,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto.")] = DEVICE,
    *,
    output: Output,
) -> None:
    """Is it the objective or the attention mask? Compare masked, masked causal and next-token models.

    With learned positions and with RoPE; every arm has its own learning rate. Four minutes on a large GPU with 16
    --workers.
    """
    from keyquery_studies.mask.study import Plan, run

    sizes = {"width": width, "depth": depth, "length": length, "vocabulary": vocabulary, "batch": batch}
    options: dict[str, Any] = {"steps": steps, **sizes, **chosen(seeds=seed, rates=rate, windows=window)}
    with output.watching() as progress:
        reading = run(corpus, out, Plan(**options), device, workers, output.force, progress)
    output.deliver(reading)
