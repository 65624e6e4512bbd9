"""`keyquery study lineage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, PATH, WORKERS, Out, Output, writes


@writes("json", "csv", "picture")
def lineage(
    corpus: Annotated[Path, typer.Argument(help="A text file: most bases are trained on it.")],
    other: Annotated[Path, typer.Argument(help="A text of another kind, for fine-tuning and for one base in four.")],
    out: Out = None,
    bases: Annotated[int, typer.Option(min=4, help="Bases of the first config.")] = 48,
    kin: Annotated[int, typer.Option(min=0, help="Bases from which others are made.")] = 16,
    others: Annotated[int, typer.Option(min=2, help="Bases of each of three other configs.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of a base.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Runs of different seeds share no model.")] = 1,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar=PATH, help="Reading of an earlier run with another seed, on which constants were chosen."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit of all trainings together.")] = 3600.0,
    part: Annotated[
        str,
        typer.Option(
            help="bases: train them and test their pairs; kin: make others from them and test those; all; or rows: "
            "join the rows that --out holds, whatever their settings. A part that --out holds is not computed again."
        ),
    ] = "all",
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that test pairs.")] = WORKERS,
    device: Annotated[str, typer.Option(help="Device of the trainings: cpu, cuda, or auto.")] = DEVICE,
    *,
    output: Output,
) -> None:
    """Is this model made from that one? Train bases, make others from them, and test all pairs.

    Fine-tunes, LoRA, merges, pruning, stacking, quantisation, disguises and noise; unrelated pairs, students and twins.
    """
    from keyquery_studies.lineage.study import run
    from keyquery_studies.lineage.training import Plan

    plan = Plan(bases=bases, kin=kin, others=others, steps=steps, seed=seed, seconds=seconds)
    output.deliver(run((corpus, other), out, plan, device, workers, calibration, part))
