"""`keyquery study starts`."""

from __future__ import annotations

from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, Out, Output, chosen, writes
from keyquery_studies.kernels.command import Texts
from keyquery_studies.mask.command import Seeds


@writes("json", "csv")
def starts(
    corpus: Texts = None,
    out: Out = None,
    seed: Seeds = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per model.")] = 8000,
    seconds: Annotated[float, typer.Option(min=0, help="After so many, nothing further is trained.")] = float("inf"),
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto.")] = DEVICE,
    *,
    output: Output,
) -> None:
    """Is a symmetric initialisation better because Wq = Wk, or because of its scale?

    Five starts of queries and keys, each at three rates or more; all models of an objective are trained side by side.
    """
    from keyquery_studies.starts.study import Plan, run

    with output.watching():
        reading = run(corpus, out, Plan(steps=steps, **chosen(seeds=seed)), device, seconds)
    output.deliver(reading)
