"""`keyquery study stability`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import (
    DEVICE,
    WORKERS,
    Device,
    Out,
    Output,
    ThreeSeeds,
    Vocabulary,
    Workers,
    chosen,
    writes,
)


@writes("json", "csv", "picture")
def stability(
    data: Annotated[
        Path | None,
        typer.Option(help="A text file, plain or compressed, or a folder with one. Default: the tokens in --out."),
    ] = None,
    out: Out = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(metavar="<float>", help="A learning rate; repeatable. Default: eight from 1e-3 to 0.5."),
    ] = None,
    seed: ThreeSeeds = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per model.")] = 1100,
    vocabulary: Vocabulary = 1024,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after this many minutes; with --out, a later run resumes.")
    ] = None,
    workers: Workers = WORKERS,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """How many steps before the loss spikes do alarms on attention logits warn, and how often in vain?

    Small RoPE language models are trained under `kq.Monitor` at rates from safe to far too high, with and without
    QK-norm and with structured kernels; what diverges is trained once more under QK-Clip. Rules are fit on the runs of
    --seed, and judged on those of seeds 3 to 5. With --out, an interrupted run can be resumed.
    """
    from keyquery_studies.stability.study import Plan, run

    options = chosen(rates=rate, seeds=seed) | {"steps": steps, "vocabulary": vocabulary}
    with output.watching() as progress:
        reading = run(data, out, Plan(**options), device, workers, minutes, output.force, progress)
    output.deliver(reading)
