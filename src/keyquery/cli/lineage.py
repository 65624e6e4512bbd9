"""`keyquery lineage`."""

from __future__ import annotations

from typing import Annotated

import typer

from keyquery.cli.options import Output, writes
from keyquery.instruments.lineage.lineage import lineage as compare_weights


@writes("json", "csv")
def lineage(
    ours: Annotated[str, typer.Argument(help="A model: a folder, a file (safetensors, GGUF, torch), or a hub model.")],
    theirs: Annotated[str, typer.Argument(help="The model that may be made from it.")],
    other: Annotated[
        list[str] | None,
        typer.Option("--with", help="Another model that a merge may be made of; may be repeated."),
    ] = None,
    *,
    output: Output,
) -> None:
    """Is one model made from another? Compare the spectra and the QK forms of all heads.

    Two tests: spectra of every head, which survive a rotated or permuted residual stream and a new order of heads, and
    inner products of the forms themselves. Each has a p-value against unrelated models. Reads queries and keys only.
    """
    with output.watching() as progress:
        reading = compare_weights(ours, theirs, other or (), progress=progress)
    output.deliver(reading)
