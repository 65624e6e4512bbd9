"""`keyquery roles`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keyquery.cli.options import RUNNING, Output, argument, command, option
from keyquery.instruments.roles.roles import roles as measure_roles
from keyquery.listening.inputs.load import has_lm_head, load_model


@command(
    *("json", "csv", "html", "picture"),
    calls=measure_roles,
    model=argument(str, "A folder, a .gguf file, or a hub model in the local cache."),
    text=option(Path | None, "A text file (-: standard input) to measure on as well. Default: random tokens only."),
    length=option(int, "Tokens per sequence.", min=2),
    sequences=option(int, "Sequences of random tokens and needles; at least 8 to name a role.", min=2),
    window=option(int, "Keys less than this many tokens away are local; 1: the token itself.", min=1),
    least=option(float, "Name a role only if its score exceeds its null level by at least this.", min=0, max=1),
    seed=option(int, "Seed of the random tokens.", min=0),
    **RUNNING,
)
def roles(model: str, device: str, dtype: str | None, output: Output, **options: Any) -> None:
    """Which heads copy? Score every head as previous-token, induction, retrieval, sink, …

    Further roles are duplicate-token and local heads. The model is run on repeated random tokens of its own vocabulary,
    on needles in haystacks of them, and on --text. Encoders have next-token heads too; cross-attention is scored by
    alignment. A role is named only where its score clears a null level, corrected for the number of heads and roles.
    """
    with output.watching() as progress:
        live, tokenizer = load_model(model, lm_head=has_lm_head(model), device=device, dtype=dtype)
        reading = measure_roles(live, tokenizer=tokenizer, name=Path(model).name, progress=progress, **options)
    output.deliver(reading)
