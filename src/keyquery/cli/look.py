"""`keyquery look` and `keyquery compare`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from keyquery import models
from keyquery.checkpoints import read
from keyquery.checkpoints.hub import located
from keyquery.cli.options import (
    CHECKPOINT,
    DATA,
    DEVICE,
    HEAD_COUNT,
    IDS,
    READING,
    RUNNING,
    Device,
    Option,
    Output,
    argument,
    command,
    numbers_of,
    option,
)
from keyquery.instruments.look.compare import Comparison
from keyquery.instruments.look.compare import compare as side_by_side
from keyquery.instruments.look.look import look as look_at
from keyquery.instruments.look.look import opened
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.page import DIRECTIONS
from keyquery.instruments.look.show.page import TOKENS as SAMPLE
from keyquery.learn.cooccurrence.cooccurrence import Cooccurrence
from keyquery.listening.inputs.batches import id_batches, read_ids, with_decoder_ids
from keyquery.listening.inputs.load import load_tokenizer
from keyquery.reading import Reading
from keyquery.support.devices import pick_device
from keyquery.survey.find_models import unique_names

TEXT = option(
    Path | None,
    "A text file to run the model on (-: standard input), to analyse heads on data. Default: weights alone.",
    panel=DATA,
)
TOKENS = option(int, "With --text or --ids: maximum number of tokens to run.", min=2, panel=DATA)
LENGTH = option(int, "With --text: window length in tokens; the variance shares depend on it.", min=2, panel=DATA)


@command(
    *("json", "csv", "html", "picture"),
    calls=look_at,
    model=argument(
        str | None,
        "A folder, a .safetensors, .bin, .pt or .gguf file, or a hub model (org/name), read from the local "
        "hub cache if present. Default: the two bundled models, side by side.",
    ),
    text=TEXT,
    layers=option(str | None, "Layers to read, such as 0-5 or 0,3,7. Default: all."),
    **READING,
    adapter=option(
        Path | None, "A folder with a LoRA adapter (PEFT), added to the weights as they are read.", panel=CHECKPOINT
    ),
    partial=option(
        bool,
        "Read a model of which some attention modules cannot be read; it is noted.",
        False,
        name="--partial",
        panel=CHECKPOINT,
    ),
    unproven=option(
        bool,
        "Read a model of which a config field or tensor that may move scores is not read; it is noted.",
        False,
        name="--unproven",
        panel=CHECKPOINT,
    ),
    directions=option(
        int | None,
        "Describe this many directions per head by their nearest tokens. Default: 4 with --html, else 0.",
        min=0,
    ),
    tokens=TOKENS,
    length=LENGTH,
    corpus=option(
        Path | None,
        "A text file: measure how much of each head its token co-occurrence explains; weights only.",
        panel=DATA,
    ),
    ids=IDS,
    roles=option(
        bool,
        "Score every head by role, as keyquery roles does; needs no text, but runs the model.",
        False,
        name="--roles",
    ),
    cost=option(
        bool | None,
        "Estimate what the loss needs of each head, which its label then says. Default: with --text, if the model "
        "has a loss.",
        name="--cost/--no-cost",
        show_default=False,
    ),
    **RUNNING,
)
def look(model: str | None, layers: str | None, directions: int | None, output: Output, **options: Any) -> None:
    """Show the QK circuit of every head: symmetric, skew, popularity and position parts.

    Weights are read straight from the checkpoint, one layer at a time; the model itself is built only for --text,
    --ids and --roles. The two bundled models differ in objective and attention mask: masked-token prediction with
    bidirectional attention, and next-token prediction with causal attention.
    """
    options["layers"] = None if layers is None else numbers_of("--layers", layers)
    options |= for_page("html" in output.files, directions, model)
    output.deliver(_shipped(output, options) if model is None else watched_look(model, output, **options))


@command(
    *("json", "csv", "html", "picture"),
    calls=look_at,
    first=argument(str, "A model, as for look, or the JSON file of a look."),
    second=argument(str, "Another model, or a later checkpoint of the same one."),
    text=TEXT,
    heads=HEAD_COUNT,
    adapter=option(Path | None, "A folder with a LoRA adapter (PEFT), added to the weights of the second model."),
    tokens=TOKENS,
    length=LENGTH,
    device=Option(Device, DEVICE),
)
def compare(first: str, second: str, adapter: Path | None, output: Output, **options: Any) -> None:
    """Show what differs between two models, or between two checkpoints of one.

    For models of the same shape: how far each head's QK matrix M has moved, ‖ΔM‖/‖M‖, with its symmetric and skew
    part, as a map of layers by heads and a ranking, and which tensors are identical. Models of different shapes, and
    saved looks, are shown side by side. A fine-tune that is an adapter is compared with its base by naming the base
    twice: compare BASE BASE --adapter DIR.
    """
    if adapter is not None and _is_saved(second):
        raise ValueError(f"--adapter needs the second model itself, not {second}")
    sources = ((first, None), (second, adapter))
    saved = {source: _saved_look(source) for source, _ in sources if _is_saved(source)}  # checked before a model runs
    weights = None if saved else [read(opened(model), options["heads"], adapter=added) for model, added in sources]
    looks = []
    for source, added in sources:
        shown = for_page("html" in output.files, None, source)
        looks.append(saved.get(source) or watched_look(source, output, adapter=added, **options, **shown))
    with output.watching() as progress:
        comparison = side_by_side(*_distinguished(looks, (first, second)), weights=weights, progress=progress)
    output.deliver(comparison)


def _shipped(output: Output, options: dict[str, Any]) -> Comparison:
    """The two bundled models, by default on the bundled text."""
    for name in ("heads", "query", "key", "layout", "config", "adapter"):
        if options[name] is not None:
            raise ValueError(f"{name} needs a model: name one")  # shown with the name of the option
    options |= {"text": options["text"] or (models.LONG_TEXT if options["ids"] is None else None)}
    comparison = side_by_side(*(watched_look(str(m), output, **options) for m in (models.ENCODER, models.DECODER)))
    # Trained apart from the start: which tensors are equal, and how far heads moved, would mean nothing.
    nothing: dict[str, list[str]] = {name: [] for name in comparison.changes[0]["tensors"]}
    why = {"why": "the models were trained separately", "notes": [models.DIFFERENCE], "tensors": nothing}
    return replace(comparison, changes=[{**comparison.changes[0], **why}])


def _is_saved(source: str) -> bool:
    return source.endswith((".json", ".json.xz")) and Path(source).is_file()


def _saved_look(source: str) -> Look:
    reading = Reading.load(Path(source))
    if not isinstance(reading, Look):
        raise ValueError(f"{source} is a reading of kind {reading.kind!r}, not a look")
    return reading


def _distinguished(looks: list[Look], sources: Sequence[str]) -> list[Look]:
    """Looks of the same name get as many parent folders in front of it as make them unique."""
    parts = [Path(os.path.realpath(source)).parts for source in sources]
    if len({look.model["name"] for look in looks}) == len(looks) or len(set(parts)) < len(parts):
        return looks
    names = unique_names(parts, [len(part) - 1 for part in parts])
    return [replace(look, model={**look.model, "name": name}) for look, name in zip(looks, names, strict=True)]


def watched_look(source: Any, output: Output, **options: Any) -> Look:
    """A look with a progress bar."""
    ids, device, corpus = (options.pop(name, None) for name in ("ids", "device", "corpus"))
    with output.watching() as progress:
        stays = device == "auto" and isinstance(opened(source), nn.Module)  # a live model is not moved
        if device is not None and not stays and pick_device(device) != "cpu":
            options["device"] = device
        if ids is not None:
            options |= on_ids(source, ids, options)
        if corpus is not None:
            if (tokenizer := load_tokenizer(source)) is None:
                raise ValueError("--corpus needs a tokenizer, and none was found with the model")
            options["corpus"] = Cooccurrence.from_text(corpus, tokenizer=tokenizer, progress=progress)
        reading = look_at(source, progress=progress, workers=os.cpu_count() or 1, **options)
    if corpus is not None:
        reading = replace(reading, corpus={**(reading.corpus or {}), "from": corpus.name})
    if ids is not None:
        data = {**reading.provenance["data"], "from": ids.name}
        reading = replace(reading, provenance={**reading.provenance, "data": data})
    return reading


def on_ids(source: Any, ids: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `look` for a file of token ids: whole sequences, however long."""
    if options.get("text") is not None:
        raise ValueError("give --text or --ids, not both")
    how = ("heads", "query", "key", "config", "partial", "unproven")
    heads = read(source, **{name: options[name] for name in how if name in options})
    rows = read_ids(ids, heads)
    batches = id_batches(rows, options["tokens"])
    if heads.config.get("is_encoder_decoder"):
        batches = with_decoder_ids(batches)
    return {"inputs": batches, "length": max(map(len, rows))}


def for_page(html: bool, directions: int | None, source: str | None) -> dict[str, int]:
    """Options of `look` for what only a page shows: token directions and a sample of attention maps.

    Directions of a hub model require fetching its embeddings, so they are measured only on request.
    """
    if directions is None:
        directions = DIRECTIONS if html and (source is None or located(source).exists()) else 0
    return {"directions": directions, "sample": SAMPLE if html else 0}
