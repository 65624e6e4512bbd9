"""`keyquery attribute` and `keyquery wiring`: what feeds the queries and keys of heads."""

from __future__ import annotations

from typing import Any

from keyquery import models
from keyquery.cli.options import DATA, IDS, MODEL, RUNNING, TEXT, Output, command, option
from keyquery.cli.surgery import running
from keyquery.instruments.attribution.attribution import attribute as attribute_head
from keyquery.instruments.attribution.wiring import wiring as measure_wiring
from keyquery.listening.inputs.batches import TOKENS
from keyquery.listening.inputs.load import in_float32

LENGTH = option(int, "Window length in tokens.", min=2, panel=DATA)


@command(
    *("json", "csv", "html", "picture"),
    calls=attribute_head,
    model=MODEL,
    text=TEXT,
    ids=IDS,
    head=option(str | None, "The head as LAYER.HEAD, such as 18.6, or 'decoder 1.3'. Required."),
    query=option(int | None, "Position of the query token in its window. Default: all pairs.", min=0),
    key=option(int | None, "Position of the key token. Default: the one attended to most.", min=0),
    depth=option(
        int, "2: follow the largest sources that are heads along their own attention, in raw scores.", min=1, max=2
    ),
    without=option(
        str | None, "Ablate a path: take this source, such as 16.0 or 'mlp 3', out of the head's keys alone."
    ),
    side=option(str, "With --without: key, or query."),
    sequence=option(int, "Which window of the text.", min=0),
    length=LENGTH,
    **RUNNING,
)
def attribute(output: Output, head: str | None, **options: Any) -> None:
    """Show why a head attends from one token to another: its score by source.

    Sources, on the query and on the key side, are what the model wrote into the residual stream before the head:
    embeddings, earlier heads, MLPs, biases. With norms frozen at their recorded values, the entries sum to the model's
    own score.
    """
    if head is None:
        raise ValueError("give --head LAYER.HEAD, such as --head 18.6")
    with output.watching() as progress:
        loaded = _loaded(options)
        reading = attribute_head(**loaded, head=head, **options, progress=progress)
    output.deliver(reading)


@command(
    *("json", "csv", "html", "picture"),
    calls=measure_wiring,
    model=MODEL,
    text=TEXT,
    ids=IDS,
    tokens=option(int, "Maximum number of tokens to run.", min=4),
    length=LENGTH,
    seed=option(int, "Seed of the shuffled null.", min=0),
    **RUNNING,
)
def wiring(output: Output, **options: Any) -> None:
    """Show which earlier heads and MLPs feed the queries and keys of every head.

    Shares of score variance have 95 % intervals over sequences; a source is listed where its interval is above that of
    the same source with its tokens in random order. The HTML page has a map of sources by heads, with examples.
    """
    with output.watching() as progress:
        loaded = _loaded(options)
        reading = measure_wiring(**loaded, **options, progress=progress)
    output.deliver(reading)


def _loaded(options: dict[str, Any]) -> dict[str, Any]:
    """Take the model and its data out of the options: loaded, by default in float32."""
    names = ("model", "text", "ids", "device", "dtype")
    model, text, ids, device, dtype = (options.pop(name) for name in names)
    name, live, tokenizer, batches = running(
        model, text, ids, options.get("tokens", TOKENS), device=device, dtype=dtype
    )
    data = {"text": text or models.LONG_TEXT} if batches is None else {"inputs": batches}
    return {"source": live if dtype else in_float32(live), "tokenizer": tokenizer, "name": name, **data}
