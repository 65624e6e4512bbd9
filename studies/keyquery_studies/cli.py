"""`keyquery study NAME`: claims about attention, each re-run by one command."""

from __future__ import annotations

import typer

from keyquery_studies.causes.command import causes
from keyquery_studies.circuit.command import circuit
from keyquery_studies.datapoints.command import datapoints
from keyquery_studies.dial.command import dial
from keyquery_studies.kernels.command import kernels
from keyquery_studies.lineage.command import lineage
from keyquery_studies.mask.command import mask
from keyquery_studies.objectives.command import objectives
from keyquery_studies.primal.command import primal
from keyquery_studies.rerank.command import rerank
from keyquery_studies.stability.command import stability
from keyquery_studies.starts.command import starts
from keyquery_studies.time.command import time
from keyquery_studies.words.command import words

study = typer.Typer(
    help="Claims about attention, each re-run by one command.", no_args_is_help=True, rich_markup_mode="markdown"
)
COMMANDS = (
    objectives,
    mask,
    starts,
    kernels,
    dial,
    circuit,
    primal,
    time,
    causes,
    datapoints,
    rerank,
    words,
    stability,
    lineage,
)
for command in COMMANDS:
    study.command(command.__name__.replace("_", "-"))(command)


@study.callback()
def _studies() -> None:
    pass
