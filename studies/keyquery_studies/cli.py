"""`keyquery study NAME`: claims about attention, each re-run by one command."""

from __future__ import annotations

import typer

from keyquery_studies.causes import Causes
from keyquery_studies.circuit.command import circuit
from keyquery_studies.datapoints import Datapoints
from keyquery_studies.dial import Dial
from keyquery_studies.kernels.command import kernels
from keyquery_studies.lineage.command import lineage
from keyquery_studies.mask import Mask
from keyquery_studies.objectives.command import objectives
from keyquery_studies.primal.study import Primal
from keyquery_studies.rerank import Rerank
from keyquery_studies.stability.command import stability
from keyquery_studies.starts.command import starts
from keyquery_studies.time import Time
from keyquery_studies.words import Words

study = typer.Typer(
    help="Claims about attention, each re-run by one command.", no_args_is_help=True, rich_markup_mode="markdown"
)
STUDIES = (Causes, Datapoints, Dial, Mask, Primal, Rerank, Time, Words)
COMMANDS = (
    objectives,
    starts,
    kernels,
    circuit,
    stability,
    lineage,
    *(of.command() for of in STUDIES),
)
for command in COMMANDS:
    study.command(command.__name__.replace("_", "-"))(command)


@study.callback()
def _studies() -> None:
    pass
