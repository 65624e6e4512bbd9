"""`keyquery attribute` and `keyquery wiring`: what feeds the queries and keys of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery import models
from keyquery.checkpoints import read
from keyquery.cli.options import DATA, DEVICE, Device, Dtype, Ids, Output, default_of, writes
from keyquery.instruments.attribution.attribution import attribute as attribute_head
from keyquery.instruments.attribution.wiring import wiring as measure_wiring
from keyquery.listening.inputs.batches import LENGTH, TOKENS, id_batches, read_ids, with_decoder_ids
from keyquery.listening.inputs.load import in_float32, load_model

Model = Annotated[str | None, typer.Argument(help="A folder or a .gguf file. Default: the bundled decoder.")]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A text file to run the model on (-: standard input). Default: the bundled text.", rich_help_panel=DATA
    ),
]
Length = Annotated[int, typer.Option(min=2, help="Window length in tokens.", rich_help_panel=DATA)]


@writes("json", "csv", "html", "picture")
def attribute(
    model: Model = None,
    text: Text = None,
    ids: Ids = None,
    head: Annotated[
        str | None, typer.Option(help="The head as LAYER.HEAD, such as 18.6, or 'decoder 1.3'. Required.")
    ] = None,
    query: Annotated[
        int | None, typer.Option(min=0, help="Position of the query token in its window. Default: all pairs.")
    ] = None,
    key: Annotated[
        int | None, typer.Option(min=0, help="Position of the key token. Default: the one attended to most.")
    ] = None,
    depth: Annotated[
        int,
        typer.Option(
            min=1, max=2, help="2: follow the largest sources that are heads along their own attention, in raw scores."
        ),
    ] = default_of(attribute_head, "depth"),
    without: Annotated[
        str | None,
        typer.Option(help="Ablate a path: take this source, such as 16.0 or 'mlp 3', out of the head's keys alone."),
    ] = None,
    side: Annotated[str, typer.Option(help="With --without: key, or query.")] = default_of(attribute_head, "side"),
    sequence: Annotated[int, typer.Option(min=0, help="Which window of the text.")] = default_of(
        attribute_head, "sequence"
    ),
    length: Length = LENGTH,
    device: Device = DEVICE,
    dtype: Dtype = None,
    *,
    output: Output,
) -> None:
    """Show why a head attends from one token to another: its score by source.

    Sources, on the query and on the key side, are what the model wrote into the residual stream before the head:
    embeddings, earlier heads, MLPs, biases. With norms frozen at their recorded values, the entries sum to the model's
    own score.
    """
    if head is None:
        raise ValueError("give --head LAYER.HEAD, such as --head 18.6")
    options: dict[str, Any] = {"head": head, "query": query, "key": key, "depth": depth, "sequence": sequence}
    options |= {"without": without, "side": side}
    with output.watching() as progress:
        reading = attribute_head(
            **_running(model, text, ids, device, dtype), **options, length=length, progress=progress
        )
    output.deliver(reading)


@writes("json", "csv", "html", "picture")
def wiring(
    model: Model = None,
    text: Text = None,
    ids: Ids = None,
    tokens: Annotated[int, typer.Option(min=4, help="Maximum number of tokens to run.")] = TOKENS,
    length: Length = LENGTH,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the shuffled null.")] = default_of(measure_wiring, "seed"),
    device: Device = DEVICE,
    dtype: Dtype = None,
    *,
    output: Output,
) -> None:
    """Show which earlier heads and MLPs feed the queries and keys of every head.

    Shares of score variance have 95 % intervals over sequences; a source is listed where its interval is above that of
    the same source with its tokens in random order. The HTML page has a map of sources by heads, with examples.
    """
    with output.watching() as progress:
        running = _running(model, text, ids, device, dtype, tokens)
        reading = measure_wiring(**running, length=length, tokens=tokens, seed=seed, progress=progress)
    output.deliver(reading)


def _running(
    source: str | None, text: Path | None, ids: Path | None, device: str, dtype: str | None, tokens: int = TOKENS
) -> dict[str, Any]:
    """A live model, by default in float32, with its tokenizer, and the text or batches of token ids."""
    if text is not None and ids is not None:
        raise ValueError("give --text or --ids, not both")
    path = source or str(models.DECODER)
    live, tokenizer = load_model(path, device=device, dtype=dtype)
    live = live if dtype else in_float32(live)
    shared = {"source": live, "tokenizer": tokenizer, "name": Path(path).name}
    if ids is None:
        return {**shared, "text": text or models.LONG_TEXT}
    batches = id_batches(read_ids(ids, read(live)), tokens)
    seq2seq = getattr(getattr(live, "config", None), "is_encoder_decoder", False)
    return {**shared, "inputs": with_decoder_ids(batches) if seq2seq else batches}
