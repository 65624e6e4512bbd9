"""`keyquery dial` and `keyquery ablate`: the loss of a model when parts of its heads are scaled or ablated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from keyquery import models
from keyquery.checkpoints import read
from keyquery.cli.look import for_page, watched_look
from keyquery.cli.options import DATA, DEVICE, Device, Dtype, Ids, Output, default_of, numbers_of, writes
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.ablate import BY, MEASURE
from keyquery.instruments.ablation.ablate import ablate as ablate_heads
from keyquery.instruments.ablation.dialled import dial_effect
from keyquery.instruments.ablation.named import EXAMPLES
from keyquery.intervene.dial.dial import dial as dial_parts
from keyquery.listening import text_batches
from keyquery.listening.inputs.batches import LENGTH, id_batches, read_ids, read_lines
from keyquery.listening.inputs.load import load_model
from keyquery.reading import Reading
from keyquery.support.checks import check_choice

Model = Annotated[str | None, typer.Argument(help="A folder or a .gguf file. Default: the bundled decoder.")]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A text file to run the model on (-: standard input). Default: the bundled text.", rich_help_panel=DATA
    ),
]
Heads = Annotated[
    str | None,
    typer.Option(
        help="Heads as LAYER.HEAD, such as 3.* or 0.1,2.5, numbered as in look, or 'decoder 1.*'. Default: all."
    ),
]
UNCHANGED = default_of(dial_parts, "symmetric")  # gain of every part
Symmetric = Annotated[
    float, typer.Option(help="Gain on the symmetric part (similarity): 1 unchanged, 0 ablated, 2 doubled.")
]
Skew = Annotated[float, typer.Option(help="Gain on the skew part (direction).")]
Popularity = Annotated[
    float, typer.Option(help="Gain on the popularity part: the key-only term, independent of the query's content.")
]
QueryOnly = Annotated[float, typer.Option(help="Gain on the query-only part: query content with mean keys.")]
Position = Annotated[
    float,
    typer.Option(help="Gain on the position part: position embeddings, RoPE, ALiBi, relative bias, first-token sink."),
]
MeansOption = Annotated[
    str | None,
    typer.Option(
        "--means",
        help="Means that separate the parts: position or global. Default: position with 32 or more windows.",
    ),
]
Of = Annotated[
    str,
    typer.Option(
        help="Directions: singular vectors of M, eigenvectors of its symmetric part, or planes of its skew part."
    ),
]
On = Annotated[
    str,
    typer.Option(
        help="Directions of the weights, or weighted by the covariance of the data. Those of the weights hold part of "
        "the mean token too, so that scaling them also moves popularity; those on data do not."
    ),
]
OF, ON = default_of(dial_parts, "of"), default_of(dial_parts, "on")
Tokens = Annotated[int, typer.Option(min=4, help="Maximum number of tokens to run.", rich_help_panel=DATA)]
TOKENS = 4096  # fewer than for look: the model runs once per part
Length = Annotated[int, typer.Option(min=4, help="Window length in tokens.", rich_help_panel=DATA)]
CHANGES = typer.Option(help=f"What is changed, separated by commas: {EXAMPLES}.")
TOGETHER = typer.Option(help="What changes together: head (of keys and values: key head), layer, or all.")
MEASURED = typer.Option(
    help="Costs are estimated, and measured: auto (24 random ones to check the estimates, and those that are flagged "
    "or near the threshold), all, or none."
)
BUDGET = typer.Option(min=0, help="With --measure auto: how many costs are measured at most.")
THRESHOLD = typer.Option(min=0, help="Cost in nats per token up to which a change counts as free.")
DRAWS = typer.Option(min=1, help="Draws of labels, a backward pass each, that an estimate averages.")


@writes("json")
def dial(
    model: Model = None,
    text: Text = None,
    ids: Ids = None,
    symmetric: Symmetric = UNCHANGED,
    skew: Skew = UNCHANGED,
    popularity: Popularity = UNCHANGED,
    query_only: QueryOnly = UNCHANGED,
    position: Position = UNCHANGED,
    means: MeansOption = None,
    heads: Heads = None,
    directions: Annotated[
        str | None,
        typer.Option(help="Scale single directions of --heads instead of parts: numbers such as 0,1, strongest first."),
    ] = None,
    of: Of = OF,
    gain: Annotated[float, typer.Option(help="Gain on these directions: 0 ablated.")] = default_of(dial_parts, "gain"),
    on: On = ON,
    samples: Annotated[
        int, typer.Option(min=0, help="Number of sequences to show the model's output for.")
    ] = default_of(dial_effect, "samples"),
    tokens: Tokens = TOKENS,
    length: Length = LENGTH,
    device: Device = DEVICE,
    dtype: Dtype = None,
    *,
    output: Output,
) -> None:
    """Scale parts of a model's attention scores, and show its loss and output.

    Loss and output are shown before and after; scores are scaled at run time. The weights are not changed. With all
    gains at 1, nothing changes. --heads 18.6 --directions 0 --of skew ablates one direction of a head's QK form.
    """
    if directions is None and (of, gain, on) != (OF, default_of(dial_parts, "gain"), ON):
        raise ValueError("--of, --gain and --on are for --directions, which is missing")
    numbers = [] if directions is None else numbers_of("--directions", directions)
    name, live, tokenizer, batches = _running(model, text, ids, length, tokens, device, dtype)
    gains = dict(zip(PARTS, (symmetric, skew, popularity, query_only, position), strict=True))
    chosen: dict[str, Any] = {"directions": numbers, "of": of, "gain": gain, "on": on}
    with output.watching() as progress:
        shown: dict[str, Any] = {"samples": samples, "name": name, "progress": progress}
        effect = dial_effect(live, batches, tokenizer, gains, heads, means=means, **chosen, **shown)
    output.deliver(effect)


@writes("json", "csv", "html", "picture")
def ablate(
    model: Model = None,
    text: Text = None,
    ids: Ids = None,
    heads: Heads = None,
    changes: Annotated[str, CHANGES] = default_of(ablate_heads, "changes"),
    by: Annotated[str, TOGETHER] = default_of(ablate_heads, "by"),
    measure: Annotated[str, MEASURED] = default_of(ablate_heads, "measure"),
    budget: Annotated[int, BUDGET] = default_of(ablate_heads, "budget"),
    threshold: Annotated[float, THRESHOLD] = default_of(ablate_heads, "threshold"),
    samples: Annotated[int, DRAWS] = default_of(ablate_heads, "samples"),
    means: MeansOption = None,
    tokens: Tokens = TOKENS,
    length: Length = LENGTH,
    device: Device = DEVICE,
    dtype: Dtype = None,
    *,
    output: Output,
) -> None:
    """What would it cost? The loss without parts of heads, or with other changes, for all heads.

    Costs are estimated from a few backward passes, checked on this model, and measured where it matters. The HTML page
    is that of look, with the costs beside variance.
    """
    check_choice("--by", by, BY)
    check_choice("--measure", measure, MEASURE)
    if "html" in output.files and by != "head":
        raise ValueError(f"--html requires --by head, got --by {by}")
    name, live, tokenizer, batches = _running(model, text, ids, length, tokens, device, dtype)
    with output.watching() as progress:
        ablation = ablate_heads(
            live,
            batches,
            tokenizer=tokenizer,
            changes=changes,
            heads=heads,
            by=by,
            measure=measure,
            budget=budget,
            threshold=threshold,
            samples=samples,
            means=means,
            name=name,
            progress=progress,
        )
    shown: Reading | None = None
    if "html" in output.files:
        source = model or str(models.DECODER)
        data = {"ids": ids} if ids is not None else {"text": text or models.LONG_TEXT}
        shared: dict[str, Any] = {**data, "tokens": tokens, "length": length, "device": device, "dtype": dtype}
        look = watched_look(source, output, **shared, **for_page(True, None, source))
        shown = look.with_costs(ablation)
    output.deliver(ablation, page_of=shown)


class Numbers:
    """Stands in for the tokenizer of a model that has none: tokens are shown by their ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, separated by spaces."""
        return " ".join(map(str, ids))


def _running(
    source: str | None,
    text: Path | None,
    ids: Path | None,
    length: int,
    tokens: int,
    device: str,
    dtype: str | None,
) -> tuple[str, nn.Module, Any, list[Any]]:
    """A model with an LM head, its tokenizer, and the text or the token ids as batches."""
    path = source or str(models.DECODER)
    if text is not None and ids is not None:
        raise ValueError("give --text or --ids, not both")
    lines = read_lines(text or models.LONG_TEXT) if ids is None else []
    model, tokenizer = load_model(path, lm_head=True, device=device, dtype=dtype)
    if ids is not None:
        batches, tokenizer = id_batches(read_ids(ids, read(model)), tokens), tokenizer or Numbers()
    elif tokenizer is None:
        raise ValueError(f"{path} has no tokenizer, which --text requires; use --ids")
    else:
        batches = list(text_batches(lines, tokenizer, length, tokens))
    if sum(len(batch["input_ids"]) for batch in batches) < 2:
        raise ValueError(
            "the data give one sequence, but an interval needs two: use more text, raise --tokens or lower --length"
        )
    return Path(path).name, model, tokenizer, batches
