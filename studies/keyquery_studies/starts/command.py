"""`keyquery study starts`."""

from __future__ import annotations

from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, INT, Out, Output, chosen, writes
from keyquery_studies.kernels.command import Texts

Seeds = Annotated[list[int] | None, typer.Option(metavar=INT, help="A seed; repeatable. Default: five seeds.")]


@writes("json", "csv", "picture")
def starts(
    corpus: Texts = None,
    out: Out = None,
    seed: Seeds = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Training steps per model; repeatable, to see what more of them gain. Default: 2500 and 10000."
        ),
    ] = None,
    objective: Annotated[
        list[str] | None, typer.Option(help="masked or next token; repeatable. Default: both.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Learning rate; repeatable. Default: three of masked, four of next token."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="After so many, nothing further is trained.")] = float("inf"),
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto.")] = DEVICE,
    *,
    output: Output,
) -> None:
    """Is a symmetric initialisation better because Wq = Wk, or because of its scale?

    Five starts of queries and keys, each at several rates; all models of an objective are trained side by side.
    """
    from keyquery_studies.starts.study import Plan, run

    with output.watching():
        plan = Plan(**chosen(seeds=seed, steps=steps, objectives=objective, rates=rate))
        reading = run(corpus, out, plan, device, seconds)
    output.deliver(reading)
