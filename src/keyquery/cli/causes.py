"""`keyquery causes`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from keyquery.cli.options import RUNNING, Output, argument, command, numbers_of, option
from keyquery.learn.causes.causes import Causes
from keyquery.learn.causes.causes import causes as find_causes
from keyquery.learn.causes.explain import explain
from keyquery.learn.causes.masked_prediction import predicted
from keyquery.listening.inputs.load import has_lm_head, load_model
from keyquery.listening.inputs.word_pieces import Words, words_of
from keyquery.support.files import read_text


@command(
    *("json", "csv", "html", "picture"),
    calls=find_causes,
    model=argument(str, "A folder with a model and its tokenizer, or a .gguf file."),
    words=argument(str | None, "The text, in quotes.", show_default=False),
    text=option(Path | None, "Read the text from this file instead."),
    target=option(int | None, "Explain the model's prediction at this position, numbered as in the table."),
    layer=option(int | None, "Layer to take the attention from. Default: the last."),
    head=option(str | None, "Heads of the layer, such as 3 or 0,4,7. Default: all.", name="--heads"),
    nodes=option(
        str | None,
        "Positions such as 2,3,7, or a count such as 30: the 30 words that receive the most attention. Default: all.",
    ),
    alpha=option(float, "Significance level of the independence tests."),
    samples=option(float | None, "Effective sample size of the tests. Default: the hidden size."),
    method=option(str, "Causal discovery algorithm: icd or fci."),
    rounds=option(int | None, "Maximum number of ICD iterations. Default: until it ends.", min=1),
    largest=option(int, "With --target: the largest set of words to try.", 3, min=1),
    pieces=option(bool, "Do not merge subword tokens into words.", False, name="--pieces"),
    selection=option(bool, "Allow for selection bias.", False, name="--selection"),
    causal=option(
        bool | None,
        "Forbid causes later in the text than their effects. Default: on for causal attention (decoders).",
        name="--causal/--no-causal",
        show_default=False,
    ),
    **RUNNING,
)
def causes(
    model: str,
    words: str | None,
    text: Path | None,
    target: int | None,
    head: str | None,
    nodes: str | None,
    largest: int,
    pieces: bool,
    device: str,
    dtype: str | None,
    output: Output,
    **options: Any,
) -> None:
    """Infer a causal graph over the words of a text from a model's attention.

    One graph per head. With --target, the word at that position is replaced by the model's prediction, and the graphs
    guide a search for the smallest sets of words whose masking changes that prediction.
    """
    if (words is None) == (text is None):
        raise ValueError("give either the text in quotes or --text FILE, not both")
    content = words if words is not None else read_text(text or "")
    options |= {"head": None if head is None else numbers_of("--heads", head), "nodes": _nodes(nodes)}
    lm_head = target is not None and has_lm_head(model)
    live, tokenizer = load_model(model, lm_head=lm_head, device=device, dtype=dtype)
    if tokenizer is None:
        raise ValueError(f"{Path(model).name} has no tokenizer, which running a text requires")
    with output.watching() as progress:
        options |= {"name": Path(model).name, "tokenizer": tokenizer, "progress": progress}
        if target is None:
            reading = find_causes(live, text=content, merge=not pieces, **options)
        else:
            original = words_of(content, tokenizer, not pieces)
            reading = _explained(live, lm_head, original, target, largest, options)
    output.deliver(reading)


def _explained(
    live: nn.Module, lm_head: bool, original: Words, target: int, largest: int, options: dict[str, Any]
) -> Causes:
    """The graphs, and what explains the prediction at a position."""
    if not 0 <= target < len(original.texts):
        raise ValueError(f"--target must be a position from 0 to {len(original.texts) - 1}, got {target}")
    oracle = predicted(live, options["tokenizer"], original, target) if lm_head else None
    reading = find_causes(live, text=oracle.words if oracle else original, target=target, **options)
    seen = range(target) if oracle is not None and oracle.mask is None else None  # a decoder sees only the prefix
    explanation = explain(reading, target, oracle, among=seen, largest=largest)
    replaced = original.texts[target] if reading.tokens[target] != original.texts[target] else None
    return replace(reading, explanation={**explanation.to_dict(), "replaced": replaced})


def _nodes(nodes: str | None) -> int | list[int] | None:
    """A single number is a count, since a graph of a single node is meaningless."""
    numbers = None if nodes is None else numbers_of("--nodes", nodes)
    return numbers[0] if numbers is not None and len(numbers) == 1 else numbers
