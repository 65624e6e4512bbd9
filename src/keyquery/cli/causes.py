"""`keyquery causes`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery.capture.load import can_speak, load_model
from keyquery.capture.word_pieces import words_of
from keyquery.cli.options import Csv, Force, Html, Json, Picture, Quiet, deliver, targets, watching
from keyquery.instruments.causes.causes import Causes
from keyquery.instruments.causes.causes import causes as find_causes
from keyquery.instruments.causes.explain import explain
from keyquery.instruments.causes.masked_prediction import predicted
from keyquery.support.files import read_text


def causes(
    model: Annotated[str, typer.Argument(help="A folder with a model and its tokenizer, or a .gguf file.")],
    words: Annotated[str | None, typer.Argument(help="The text, in quotes.", show_default=False)] = None,
    text: Annotated[Path | None, typer.Option(help="A file with the text instead.")] = None,
    target: Annotated[
        int | None, typer.Option(help="Explain what the model predicts at this word: a position, as in the table.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Whose attention; the deepest layer's, unless given.")] = None,
    head: Annotated[str | None, typer.Option(help="Which heads, such as 3 or 0,4,7; all unless given.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Positions such as 2,3,7; or 30 for the 30 words that receive most attention.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="The level of the tests of independence.")] = 0.01,
    samples: Annotated[
        float | None, typer.Option(help="Effective sample size of the tests; the hidden size, unless given.")
    ] = None,
    method: Annotated[str, typer.Option(help="icd or fci.")] = "icd",
    rounds: Annotated[int | None, typer.Option(min=1, help="Stop icd after so many rounds.")] = None,
    largest: Annotated[int, typer.Option(min=1, help="With --target: the largest set of words to try.")] = 3,
    pieces: Annotated[bool, typer.Option("--pieces", help="Do not merge pieces of words into words.")] = False,
    selection: Annotated[bool, typer.Option("--selection", help="Allow for selection bias.")] = False,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--no-causal",
            help="No word is a cause of an earlier one; default: where no attention looks ahead, as in decoders.",
            show_default=False,
        ),
    ] = None,
    json: Json = None,
    csv: Csv = None,
    html: Html = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Read a causal graph over the words of a text out of a model's attention, one for each head.

    With --target, the model's prediction at a word is put back into the text, and the smallest sets of words whose
    masking changes it are searched for along the graphs.
    """
    files = targets(force, json=json, csv=csv, html=html, picture=picture)
    if (words is None) == (text is None):
        raise ValueError("give the text in quotes, or a file of it as --text FILE, and only one of them")
    said = words if words is not None else read_text(text or "")
    options: dict[str, Any] = {"layer": layer, "head": _numbers("--head", head), "nodes": _nodes(nodes)}
    options |= {"alpha": alpha, "samples": samples, "method": method, "rounds": rounds, "selection": selection}
    options["causal"] = causal
    with watching(quiet) as progress:
        reading = _read(model, said, target, largest, not pieces, {**options, "progress": progress})
    deliver(reading, files, quiet)


def _read(source: str, text: str, target: int | None, largest: int, merge: bool, options: dict[str, Any]) -> Causes:
    lm_head = target is not None and can_speak(source)
    live, tokenizer = load_model(source, lm_head=lm_head)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer: a text cannot be run")
    options |= {"tokenizer": tokenizer, "name": Path(source).name}
    if target is None:
        return find_causes(live, text=text, merge=merge, **options)
    said = words_of(text, tokenizer, merge)
    if not 0 <= target < len(said.texts):
        raise ValueError(f"--target must be a position from 0 to {len(said.texts) - 1}, got {target}")
    tester = predicted(live, tokenizer, said, target) if lm_head else None
    reading = find_causes(live, text=tester.words if tester else said, target=target, **options)
    seen = range(target) if tester is not None and tester.mask is None else None  # a decoder sees nothing behind it
    found = explain(reading, target, tester, among=seen, largest=largest)
    replaced = said.texts[target] if reading.tokens[target] != said.texts[target] else None
    return replace(reading, explanation={**found.to_dict(), "replaced": replaced})


def _nodes(nodes: str | None) -> int | list[int] | None:
    """A single number is how many; a single node would be no graph."""
    found = _numbers("--nodes", nodes)
    return found[0] if found is not None and len(found) == 1 else found


def _numbers(option: str, given: str | None) -> list[int] | None:
    if given is None:
        return None
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise ValueError(f"{option} takes numbers such as 2,3,7, got {given!r}")
    return list(map(int, parts))
