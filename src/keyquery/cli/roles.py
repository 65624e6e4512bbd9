"""`keyquery roles`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import DEVICE, Device, Dtype, Output, writes
from keyquery.instruments.roles.roles import roles as measure_roles
from keyquery.instruments.roles.run import LEAST, SEQUENCES, WINDOW
from keyquery.listening.inputs.batches import LENGTH
from keyquery.listening.inputs.load import has_lm_head, load_model


@writes("json", "csv", "html", "picture")
def roles(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, or a hub model in the local cache.")],
    text: Annotated[
        Path | None,
        typer.Option(help="A text file (-: standard input) to measure on as well. Default: random tokens only."),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = LENGTH,
    sequences: Annotated[
        int, typer.Option(min=2, help="Sequences of random tokens and needles; at least 8 to name a role.")
    ] = SEQUENCES,
    window: Annotated[
        int, typer.Option(min=1, help="Keys less than this many tokens away are local; 1: the token itself.")
    ] = WINDOW,
    least: Annotated[
        float,
        typer.Option(min=0, max=1, help="Name a role only if its score exceeds its null level by at least this."),
    ] = LEAST,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random tokens.")] = 0,
    device: Device = DEVICE,
    dtype: Dtype = None,
    *,
    output: Output,
) -> None:
    """Which heads copy? Score every head as previous-token, induction, retrieval, sink, …

    Further roles are duplicate-token and local heads. The model is run on repeated random tokens of its own vocabulary,
    on needles in haystacks of them, and on --text. Encoders have next-token heads too; cross-attention is scored by
    alignment. A role is named only where its score clears a null level, corrected for the number of heads and roles.
    """
    with output.watching() as progress:
        live, tokenizer = load_model(model, lm_head=has_lm_head(model), device=device, dtype=dtype)
        reading = measure_roles(
            live,
            text,
            tokenizer=tokenizer,
            name=Path(model).name,
            length=length,
            sequences=sequences,
            window=window,
            least=least,
            seed=seed,
            progress=progress,
        )
    output.deliver(reading)
