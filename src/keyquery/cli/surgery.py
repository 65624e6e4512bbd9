"""`keyquery dial` and `keyquery ablate`: what a model loses when parts of its heads are scaled or ablated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from keyquery import models
from keyquery.capture import text_batches
from keyquery.capture.batches import id_batches, read_ids, read_lines
from keyquery.capture.load import load_model, pick_device
from keyquery.checkpoints import read
from keyquery.cli.look import for_page, watched_look
from keyquery.cli.options import Csv, Device, Force, Html, Ids, Json, Picture, Quiet, deliver, targets, watching
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.ablate import ablate as ablate_parts
from keyquery.instruments.ablation.dialled import dial_effect
from keyquery.instruments.ablation.losses import default_loss
from keyquery.instruments.look.labels import Thresholds
from keyquery.reading import Reading
from keyquery.support.checks import check_choice

Model = Annotated[str | None, typer.Argument(help="A folder or a .gguf file. Default: the decoder that ships.")]
Text = Annotated[
    Path | None, typer.Option(help="Lines of text to run it on (-: standard input). Default: the text that ships.")
]
Heads = Annotated[
    str | None,
    typer.Option(
        help="Which heads, LAYER.HEAD such as 3.* or 0.1,2.5, numbered as look does, or 'decoder 1.*'. Default: all."
    ),
]
Symmetric = Annotated[float, typer.Option(help="Gain on the symmetric part (similarity): 1 as it is, 0 off, 2 twice.")]
Skew = Annotated[float, typer.Option(help="Gain on the skew part (direction).")]
Popularity = Annotated[
    float, typer.Option(help="Gain on the key-only part: what a key's content draws from every query.")
]
QueryOnly = Annotated[float, typer.Option(help="Gain on what a query's content does with positions.")]
Position = Annotated[
    float, typer.Option(help="Gain on the position part: embeddings, RoPE, ALiBi, biases, first-token sink.")
]
MeansOption = Annotated[
    str | None,
    typer.Option(
        "--means", help="position or global: which means separate the parts. Default: position from 32 windows on."
    ),
]
Tokens = Annotated[int, typer.Option(min=4, help="How many tokens to run at most.")]
Length = Annotated[int, typer.Option(min=4, help="The length of a window of the text in tokens.")]


def dial(
    model: Model = None,
    text: Text = None,
    ids: Ids = None,
    symmetric: Symmetric = 1.0,
    skew: Skew = 1.0,
    popularity: Popularity = 1.0,
    query_only: QueryOnly = 1.0,
    position: Position = 1.0,
    means: MeansOption = None,
    heads: Heads = None,
    samples: Annotated[int, typer.Option(min=0, help="Of how many sequences to show what the model says.")] = 3,
    tokens: Tokens = 4096,
    length: Length = 128,
    device: Device = "auto",
    json: Json = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Scale parts of a model's attention scores while it runs: the loss and what it writes, before and after.

    Weights stay as they are. With all gains 1 nothing changes.
    """
    files = targets(force, json=json)
    name, live, tokenizer, batches = _running(model, text, ids, length, tokens, device)
    gains = dict(zip(PARTS, (symmetric, skew, popularity, query_only, position), strict=True))
    deliver(dial_effect(live, batches, tokenizer, gains, heads, means=means, samples=samples, name=name), files, quiet)


def ablate(
    model: Model = None,
    text: Text = None,
    ids: Ids = None,
    heads: Heads = None,
    by: Annotated[str, typer.Option(help="head, layer or all: what is ablated at a time.")] = "head",
    parts: Annotated[
        str | None,
        typer.Option(
            help="Which parts, such as symmetric,position; zero and mean ablate whole heads. Default: the five parts."
        ),
    ] = None,
    means: MeansOption = None,
    limit: Annotated[
        float, typer.Option(min=0, help="Nats per token: a part that costs less can be left out.")
    ] = 0.01,
    tokens: Tokens = 4096,
    length: Length = 128,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    html: Html = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Ablate every part of every head, one after the other, and measure the change of the loss.

    The model is run on the text once for each head and part: --heads, --by layer and --tokens make it quicker. The
    page is that of look, with labels that come from what each part costs.
    """
    check_choice("--by", by, ("head", "layer", "all"))
    if html is not None and by != "head":
        raise ValueError(f"--html shows heads: it goes with --by head, not {by}")
    files = targets(force, json=json, csv=csv, html=html, picture=picture)
    name, live, tokenizer, batches = _running(model, text, ids, length, tokens, device)
    _, loss = default_loss(live, tokenizer)
    with watching(quiet) as progress:
        options = {} if parts is None else {"parts": [part.strip() for part in parts.split(",")]}
        found = ablate_parts(
            live, batches, loss, heads=heads, by=by, means=means, name=name, progress=progress, **options
        )
    shown: Reading | None = None
    if html is not None:
        source = model or str(models.DECODER)
        data = {"ids": ids} if ids is not None else {"text": text or models.LONG_TEXT}
        shared: dict[str, Any] = {**data, "tokens": tokens, "length": length}
        look = watched_look(source, quiet, **shared, **for_page(html, None, source))
        shown = found.onto(look, Thresholds(loss=limit))
    deliver(found, files, quiet, page_of=shown)


class Numbers:
    """In the place of a tokenizer that a model lacks: tokens are called by their ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, as a file of them holds them."""
        return " ".join(map(str, ids))


def _running(
    source: str | None, text: Path | None, ids: Path | None, length: int, tokens: int, device: str
) -> tuple[str, nn.Module, Any, list[Any]]:
    """A model that gives logits, its tokenizer, and the text or the token ids as batches."""
    path = source or str(models.DECODER)
    if text is not None and ids is not None:
        raise ValueError("give --text or --ids, not both: each says what the model is run on")
    lines = read_lines(text or models.LONG_TEXT) if ids is None else []
    model, tokenizer = load_model(path, lm_head=True)
    if ids is not None:
        batches, tokenizer = id_batches(read_ids(ids, read(model)), tokens), tokenizer or Numbers()
    elif tokenizer is None:
        raise ValueError(f"{path} has no tokenizer: a text cannot be run; --ids takes token ids")
    else:
        batches = list(text_batches(lines, tokenizer, length, tokens))
    if sum(len(batch["input_ids"]) for batch in batches) < 2:
        raise ValueError("the data give one sequence, and an interval needs two: more of it or --tokens, less --length")
    return Path(path).name, model.to(pick_device(device)), tokenizer, batches
