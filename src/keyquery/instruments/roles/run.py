"""One run of all measurements: random tokens, needles, and the user's own data, in a live model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from keyquery.checkpoints import Heads
from keyquery.instruments.roles.measure import (
    Measured,
    ScoredLayer,
    at_once,
    layers_read,
    layers_seen,
    measure,
    retrieval,
)
from keyquery.instruments.roles.naming import ERROR, MIN_SEQUENCES, named
from keyquery.instruments.roles.sequences import Vocabulary, needles, repeated
from keyquery.listening.hooks import Batch, context_of, has_two_sides
from keyquery.listening.inputs.batches import LENGTH, with_decoder_ids
from keyquery.listening.inputs.data import as_arguments, embedded_tokens, token_argument
from keyquery.support.checks import check_count, check_number
from keyquery.support.progress import Progress

SEQUENCES, WINDOW, EXCESS = 32, 8, 0.3
# Inputs of models that need nothing but token ids.
TOKENS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "decoder_input_ids"}
TOKENS |= {"decoder_attention_mask"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How roles are measured; checked when created."""

    length: int = LENGTH
    sequences: int = SEQUENCES
    window: int = WINDOW
    least: float = EXCESS
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("length", self.length, least=2)
        check_count("sequences", self.sequences, least=2)
        check_count("window", self.window)
        check_number("least", self.least)
        if not 0 <= self.least <= 1:
            raise ValueError(f"least must be between 0 and 1, as scores are, got {self.least:g}")
        check_count("seed", self.seed, least=0)


def run(
    model: nn.Module,
    heads: Heads | None,
    tokenizer: Any,
    data: Mapping[str, list[Batch]],
    options: Options,
    watching: Progress,
) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Rows per head, facts for provenance, and notes; without `heads`, layers are those of the attention calls."""
    notes, vocabulary = list[str](), None
    if others := _others(model, [batch for batches in data.values() for batch in batches]):
        notes.append(f"random tokens are not measured: the inputs have {others[0]}, not token ids alone")
    else:
        vocabulary = _vocabulary(model, heads, tokenizer)
    if vocabulary is None and not data:
        takes = getattr(model, "main_input_name", "other inputs")
        raise ValueError(f"{type(model).__name__} takes {takes}, not token ids: pass inputs")
    layers = layers_read(heads) if heads is not None else layers_seen(model, _first(model, data))
    measured: dict[str, Measured] = {}
    facts: dict[str, Any] = {**asdict(options), "error": ERROR, "data": [*data]}
    context = context_of(model)
    if context is not None and context < options.length and not hasattr(model, "config"):  # learned positions alone
        options = replace(options, length=context)
        notes.append(f"random tokens are {context} a sequence: the model has no more positions")
    if vocabulary is not None:
        measured, more, reasons = _on_random_tokens(model, layers, vocabulary, options, watching)
        facts |= more
        notes += reasons
    for kind, batches in data.items():
        closed = kind == "text" and vocabulary is not None and bool(vocabulary.after)
        seen = watching(batches, f"running on the {kind}", len(batches))
        measured[kind] = measure(model, seen, layers, options.window, closed)
    if not any(measured.values()):
        raise ValueError(f"{type(model).__name__} returns no attention maps of the heads that were read")
    rows = named(measured, layers, options.least)
    counts = {on: row["sequences"] for head in rows for role in head["scores"].values() for on, row in role.items()}
    notes += [
        f"{on}: {count} sequences, and at least {MIN_SEQUENCES} are needed to name a role"
        for on, count in counts.items()
        if count < MIN_SEQUENCES and on != "needle"  # of which only those that the model answers count
    ]
    return rows, {**facts, "data": [*measured]}, notes


def _on_random_tokens(
    model: nn.Module, layers: list[ScoredLayer], vocabulary: Vocabulary, options: Options, watching: Progress
) -> tuple[dict[str, Measured], dict[str, Any], list[str]]:
    """Scores on repeated random tokens and, for decoders, on needles."""
    ids = repeated(vocabulary, options.sequences, options.length, options.seed)
    batches: list[Batch] = [{token_argument(model): part} for part in ids.split(at_once(options.length))]
    decoder = all(layer.causal for layer in layers)
    needle = needles(vocabulary, options.sequences, options.length, options.seed + 1) if decoder else None
    few_tokens = f"retrieval is not measured: needles of {options.length} different tokens need a larger vocabulary"
    batches = with_decoder_ids(batches) if has_two_sides(model) else batches
    seen = watching(batches, "running on random tokens", len(batches))
    closed = bool(vocabulary.after)
    measured = {"random": measure(model, seen, layers, options.window, closed)}
    if needle is None:
        return measured, {}, [few_tokens] * decoder
    copied = retrieval(model, needle, layers, watching)
    if isinstance(copied, str):
        return measured, {}, [f"retrieval is not measured: {copied}"]
    scores, accuracy = copied
    few = f"the model predicts {accuracy:.0%} of the needles' tokens, and retrieval counts only needles that it answers"
    return {**measured, "needle": scores}, {"needle_accuracy": accuracy}, [few] if accuracy < 0.5 else []


def _vocabulary(model: nn.Module, heads: Heads | None, tokenizer: Any) -> Vocabulary | None:
    """The tokens of a model that takes token ids; None for one that does not."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    config: Any = getattr(model, "config", None)
    facts = config.to_dict() if hasattr(config, "to_dict") else config if isinstance(config, Mapping) else {}
    size = facts.get("vocab_size") or getattr(config, "vocab_size", None)
    if size is None and heads is not None:
        size = (heads.embedding_shape or (None,))[0]
    size = embedded_tokens(model) if size is None else size
    vocabulary = None if size is None else Vocabulary.of(int(size), tokenizer, facts)
    return vocabulary if vocabulary is not None and len(vocabulary.pool) > 1 else None


def _others(model: nn.Module, batches: list[Batch]) -> list[str]:
    """Names of inputs besides token ids."""
    ids = token_argument(model)
    return [
        name
        for name in dict.fromkeys(name for batch in batches for name in batch)
        if name not in TOKENS and (name != ids or any(batch[ids].is_floating_point() for batch in batches))
    ]


def _first(model: nn.Module, data: Mapping[str, list[Batch]]) -> Batch:
    """A batch that shows the layers of a model: a sequence of the data, or a few tokens."""
    batch = next((batches[0] for batches in data.values()), None)
    if batch is None:
        return {token_argument(model): torch.zeros(1, 2, dtype=torch.long)}
    part = next(iter(as_arguments(model, batch)))
    single = len({len(value) for value in part.values()}) == 1
    return {name: value[:1] for name, value in part.items()} if single else part
