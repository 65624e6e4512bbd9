"""`keyquery causes`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from keyquery.cli.options import DEVICE, Device, Dtype, Output, default_of, writes
from keyquery.learn.causes.causes import Causes
from keyquery.learn.causes.causes import causes as find_causes
from keyquery.learn.causes.explain import explain
from keyquery.learn.causes.masked_prediction import predicted
from keyquery.listening.inputs.load import has_lm_head, load_model
from keyquery.listening.inputs.word_pieces import words_of
from keyquery.support.files import read_text


@writes("json", "csv", "html", "picture")
def causes(
    model: Annotated[str, typer.Argument(help="A folder with a model and its tokenizer, or a .gguf file.")],
    words: Annotated[str | None, typer.Argument(help="The text, in quotes.", show_default=False)] = None,
    text: Annotated[Path | None, typer.Option(help="Read the text from this file instead.")] = None,
    target: Annotated[
        int | None, typer.Option(help="Explain the model's prediction at this position, numbered as in the table.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Layer to take the attention from. Default: the last.")] = None,
    head: Annotated[
        str | None, typer.Option("--heads", help="Heads of the layer, such as 3 or 0,4,7. Default: all.")
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Positions such as 2,3,7, or a count such as 30: the 30 words that receive the most attention. "
            "Default: all."
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Significance level of the independence tests.")] = default_of(
        find_causes, "alpha"
    ),
    samples: Annotated[
        float | None, typer.Option(help="Effective sample size of the tests. Default: the hidden size.")
    ] = None,
    method: Annotated[str, typer.Option(help="Causal discovery algorithm: icd or fci.")] = default_of(
        find_causes, "method"
    ),
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of ICD iterations. Default: until it ends.")
    ] = None,
    largest: Annotated[int, typer.Option(min=1, help="With --target: the largest set of words to try.")] = 3,
    pieces: Annotated[bool, typer.Option("--pieces", help="Do not merge subword tokens into words.")] = False,
    selection: Annotated[bool, typer.Option("--selection", help="Allow for selection bias.")] = False,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--no-causal",
            help="Forbid causes later in the text than their effects. Default: on for causal attention (decoders).",
            show_default=False,
        ),
    ] = None,
    device: Device = DEVICE,
    dtype: Dtype = None,
    *,
    output: Output,
) -> None:
    """Infer a causal graph over the words of a text from a model's attention.

    One graph per head. With --target, the word at that position is replaced by the model's prediction, and the graphs
    guide a search for the smallest sets of words whose masking changes that prediction.
    """
    if (words is None) == (text is None):
        raise ValueError("give either the text in quotes or --text FILE, not both")
    content = words if words is not None else read_text(text or "")
    options: dict[str, Any] = {"alpha": alpha, "samples": samples, "method": method, "rounds": rounds}
    options |= {"layer": layer, "head": _numbers("--heads", head), "nodes": _nodes(nodes)}
    options |= {"selection": selection, "causal": causal}
    lm_head = target is not None and has_lm_head(model)
    live = load_model(model, lm_head=lm_head, device=device, dtype=dtype)
    with output.watching() as progress:
        options |= {"name": Path(model).name, "progress": progress}
        reading = _read(live, lm_head, content, target, largest, not pieces, options)
    output.deliver(reading)


def _read(
    loaded: tuple[nn.Module, Any],
    lm_head: bool,
    text: str,
    target: int | None,
    largest: int,
    merge: bool,
    options: dict[str, Any],
) -> Causes:
    live, tokenizer = loaded
    if tokenizer is None:
        raise ValueError(f"{options['name']} has no tokenizer, which running a text requires")
    options |= {"tokenizer": tokenizer}
    if target is None:
        return find_causes(live, text=text, merge=merge, **options)
    original = words_of(text, tokenizer, merge)
    if not 0 <= target < len(original.texts):
        raise ValueError(f"--target must be a position from 0 to {len(original.texts) - 1}, got {target}")
    oracle = predicted(live, tokenizer, original, target) if lm_head else None
    reading = find_causes(live, text=oracle.words if oracle else original, target=target, **options)
    seen = range(target) if oracle is not None and oracle.mask is None else None  # a decoder sees only the prefix
    explanation = explain(reading, target, oracle, among=seen, largest=largest)
    replaced = original.texts[target] if reading.tokens[target] != original.texts[target] else None
    return replace(reading, explanation={**explanation.to_dict(), "replaced": replaced})


def _nodes(nodes: str | None) -> int | list[int] | None:
    """A single number is a count, since a graph of a single node is meaningless."""
    numbers = _numbers("--nodes", nodes)
    return numbers[0] if numbers is not None and len(numbers) == 1 else numbers


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise ValueError(f"{option} takes numbers such as 2,3,7, got {text!r}")
    return list(map(int, parts))
