"""`keyquery dial` and `keyquery ablate`: the loss of a model when parts of its heads are scaled or ablated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from keyquery import models
from keyquery.checkpoints import read
from keyquery.cli.look import for_page, watched_look
from keyquery.cli.options import DATA, IDS, MODEL, RUNNING, TEXT, Output, command, default_of, numbers_of, option
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.ablate import BY, MEASURE
from keyquery.instruments.ablation.ablate import ablate as ablate_heads
from keyquery.instruments.ablation.dialled import dial_effect
from keyquery.instruments.ablation.named import EXAMPLES
from keyquery.intervene.dial.dial import dial as dial_parts
from keyquery.listening import Batch, text_batches
from keyquery.listening.hooks import has_two_sides
from keyquery.listening.inputs.batches import LENGTH, TOKENS, id_batches, read_ids, read_lines, with_decoder_ids
from keyquery.listening.inputs.load import load_model
from keyquery.reading import Reading
from keyquery.support.checks import check_choice

HEADS = option(
    str | None, "Heads as LAYER.HEAD, such as 3.* or 0.1,2.5, numbered as in look, or 'decoder 1.*'. Default: all."
)
MEANS = option(
    str | None, "Means that separate the parts: position or global. Default: position with 32 or more windows."
)
RUN = {  # fewer tokens than for look: the model runs once per part
    "tokens": option(int, "Maximum number of tokens to run.", 4096, min=4, panel=DATA),
    "length": option(int, "Window length in tokens.", LENGTH, min=4, panel=DATA),
    **RUNNING,
}


@command(
    "json",
    calls=dial_parts,
    model=MODEL,
    text=TEXT,
    ids=IDS,
    symmetric=option(float, "Gain on the symmetric part (similarity): 1 unchanged, 0 ablated, 2 doubled."),
    skew=option(float, "Gain on the skew part (direction)."),
    popularity=option(float, "Gain on the popularity part: the key-only term, independent of the query's content."),
    query_only=option(float, "Gain on the query-only part: query content with mean keys."),
    position=option(
        float, "Gain on the position part: position embeddings, RoPE, ALiBi, relative bias, first-token sink."
    ),
    means=MEANS,
    heads=HEADS,
    directions=option(
        str | None, "Scale single directions of --heads instead of parts: numbers such as 0,1, strongest first."
    ),
    of=option(
        str, "Directions: singular vectors of M, eigenvectors of its symmetric part, or planes of its skew part."
    ),
    gain=option(float, "Gain on these directions: 0 ablated."),
    on=option(
        str,
        "Directions of the weights, or weighted by the covariance of the data. Those of the weights hold part of "
        "the mean token too, so that scaling them also moves popularity; those on data do not.",
    ),
    samples=option(
        int, "Number of sequences to show the model's output for.", default_of(dial_effect, "samples"), min=0
    ),
    **RUN,
)
def dial(output: Output, heads: str | None, directions: str | None, **options: Any) -> None:
    """Scale parts of a model's attention scores, and show its loss and output.

    Loss and output are shown before and after; scores are scaled at run time. The weights are not changed. With all
    gains at 1, nothing changes. --heads 18.6 --directions 0 --of skew ablates one direction of a head's QK form.
    """
    chosen = {name: options.pop(name) for name in ("of", "gain", "on")}
    if directions is None and chosen != {name: default_of(dial_parts, name) for name in chosen}:
        raise ValueError("--of, --gain and --on are for --directions, which is missing")
    numbers = [] if directions is None else numbers_of("--directions", directions)
    gains = {part: options.pop(part) for part in PARTS}
    shown = {name: options.pop(name) for name in ("means", "samples")}
    name, live, tokenizer, batches = _with_batches(**options)
    with output.watching() as progress:
        shown |= {"name": name, "progress": progress}
        effect = dial_effect(live, batches, tokenizer, gains, heads, directions=numbers, **chosen, **shown)
    output.deliver(effect)


@command(
    *("json", "csv", "html", "picture"),
    calls=ablate_heads,
    model=MODEL,
    text=TEXT,
    ids=IDS,
    heads=HEADS,
    changes=option(str, f"What is changed, separated by commas: {EXAMPLES}."),
    by=option(str, "What changes together: head (of keys and values: key head), layer, or all."),
    measure=option(
        str,
        "Costs are estimated, and measured: auto (24 random ones to check the estimates, and those that are flagged "
        "or near the threshold), all, or none.",
    ),
    budget=option(int, "With --measure auto: how many costs are measured at most.", min=0),
    threshold=option(float, "Cost in nats per token up to which a change counts as free.", min=0),
    samples=option(int, "Draws of labels, a backward pass each, that an estimate averages.", min=1),
    means=MEANS,
    **RUN,
)
def ablate(output: Output, **options: Any) -> None:
    """What would it cost? The loss without parts of heads, or with other changes, for all heads.

    Costs are estimated from a few backward passes, checked on this model, and measured where it matters. The HTML page
    is that of look, with the costs beside variance.
    """
    check_choice("--by", options["by"], BY)
    check_choice("--measure", options["measure"], MEASURE)
    if "html" in output.files and options["by"] != "head":
        raise ValueError(f"--html requires --by head, got --by {options['by']}")
    shared: dict[str, Any] = {name: options.pop(name) for name in ("tokens", "length", "device", "dtype")}
    model, text, ids = (options.pop(name) for name in ("model", "text", "ids"))
    name, live, tokenizer, batches = _with_batches(model, text, ids, **shared)
    with output.watching() as progress:
        ablation = ablate_heads(live, batches, tokenizer=tokenizer, name=name, progress=progress, **options)
    shown: Reading | None = None
    if "html" in output.files:
        source = model or str(models.DECODER)
        data = {"ids": ids} if ids is not None else {"text": text or models.LONG_TEXT}
        shown = watched_look(source, output, **data, **shared, **for_page(True, None, source)).with_costs(ablation)
    output.deliver(ablation, page_of=shown)


class Numbers:
    """Stands in for the tokenizer of a model that has none: tokens are shown by their ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, separated by spaces."""
        return " ".join(map(str, ids))


def running(
    model: str | None, text: Path | None, ids: Path | None, tokens: int = TOKENS, **options: Any
) -> tuple[str, nn.Module, Any, list[Batch] | None]:
    """The name of a model, the model, its tokenizer, and the token ids of a file, if one is given, as batches."""
    if text is not None and ids is not None:
        raise ValueError("give --text or --ids, not both")
    path = model or str(models.DECODER)
    live, tokenizer = load_model(path, **options)
    batches = None if ids is None else id_batches(read_ids(ids, read(live)), tokens)
    if batches is not None and has_two_sides(live):
        batches = with_decoder_ids(batches)
    return Path(path).name, live, tokenizer, batches


def _with_batches(
    model: str | None, text: Path | None, ids: Path | None, length: int, tokens: int, **options: Any
) -> tuple[str, nn.Module, Any, list[Batch]]:
    """The same with an LM head, and a text as batches too."""
    lines = read_lines(text or models.LONG_TEXT) if ids is None else []  # before the model is built
    name, live, tokenizer, batches = running(model, text, ids, tokens, lm_head=True, **options)
    if batches is None and tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, which --text requires; use --ids")
    batches = list(text_batches(lines, tokenizer, length, tokens)) if batches is None else batches
    if sum(len(batch["input_ids"]) for batch in batches) < 2:
        raise ValueError(
            "the data give one sequence, but an interval needs two: use more text, raise --tokens or lower --length"
        )
    return name, live, tokenizer or Numbers(), batches
