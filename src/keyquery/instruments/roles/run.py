"""One run of all measurements: random tokens, needles, and the user's own data, in a live model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from keyquery.capture.batches import LENGTH, with_decoder_ids
from keyquery.capture.hooks import Batch, has_two_sides
from keyquery.checkpoints import Heads
from keyquery.instruments.roles.measure import Measured, Place, at_once, measure, places_of, retrieval
from keyquery.instruments.roles.naming import ERROR, FEWEST, named
from keyquery.instruments.roles.sequences import Vocabulary, needles, repeated
from keyquery.support.checks import check_count, check_number
from keyquery.support.progress import Progress

SEQUENCES, WINDOW, LEAST = 32, 8, 0.3
# Inputs of models that need nothing but token ids.
TOKENS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How roles are measured; checked when created."""

    length: int = LENGTH
    sequences: int = SEQUENCES
    window: int = WINDOW
    least: float = LEAST
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
    heads: Heads,
    tokenizer: Any,
    data: Mapping[str, list[Batch]],
    options: Options,
    watching: Progress,
) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Rows per head, facts for provenance, and notes; `data` are the user's batches, by "text" or "inputs"."""
    places, notes = places_of(heads), list[str]()
    vocabulary = _vocabulary(model, heads, tokenizer)
    if others := sorted({name for batches in data.values() for batch in batches for name in batch} - TOKENS):
        vocabulary = None
        notes.append(f"random tokens are not measured: the inputs have {others[0]}, not token ids alone")
    if vocabulary is None and not data:
        takes = getattr(model, "main_input_name", "other inputs")
        raise ValueError(f"{type(model).__name__} takes {takes}, not token ids: pass inputs")
    measured: dict[str, Measured] = {}
    facts: dict[str, Any] = {**asdict(options), "error": ERROR, "data": [*data]}
    if vocabulary is not None:
        own, found, why = _on_random_tokens(model, places, vocabulary, options, watching)
        measured |= own
        facts |= found
        notes += why
    for kind, batches in data.items():
        closed = kind == "text" and vocabulary is not None and bool(vocabulary.after)
        seen = watching(batches, f"running on the {kind}", len(batches))
        measured[kind] = measure(model, seen, places, options.window, closed)
    if not any(measured.values()):
        raise ValueError(f"{type(model).__name__} returns no attention maps of the heads that were read")
    rows = named(measured, places, options.least)
    counts = {on: row["sequences"] for head in rows for role in head["scores"].values() for on, row in role.items()}
    notes += [
        f"{on}: {count} sequences, and at least {FEWEST} are needed to name a role"
        for on, count in counts.items()
        if count < FEWEST and on != "needle"  # of which only those that the model answers count
    ]
    return rows, {**facts, "data": [*measured]}, notes


def _on_random_tokens(
    model: nn.Module, places: list[Place], vocabulary: Vocabulary, options: Options, watching: Progress
) -> tuple[dict[str, Measured], dict[str, Any], list[str]]:
    """Scores on repeated random tokens and, for decoders, on needles."""
    ids = repeated(vocabulary, options.sequences, options.length, options.seed)
    batches: list[Batch] = [{"input_ids": part} for part in ids.split(at_once(options.length))]
    decoder = all(place.causal for place in places)
    needle = needles(vocabulary, options.sequences, options.length, options.seed + 1) if decoder else None
    few_tokens = f"retrieval is not measured: needles of {options.length} different tokens need a larger vocabulary"
    batches = with_decoder_ids(batches) if has_two_sides(model) else batches
    seen = watching(batches, "running on random tokens", len(batches))
    closed = bool(vocabulary.after)
    measured = {"random": measure(model, seen, places, options.window, closed)}
    if needle is None:
        return measured, {}, [few_tokens] * decoder
    copied = retrieval(model, needle, places, watching)
    if copied is None:
        return measured, {}, [f"retrieval is not measured: {type(model).__name__} has no LM head"]
    scores, accuracy = copied
    few = f"the model predicts {accuracy:.0%} of the needles' tokens, and retrieval counts only needles that it answers"
    return {**measured, "needle": scores}, {"needle_accuracy": accuracy}, [few] if accuracy < 0.5 else []


def _vocabulary(model: nn.Module, heads: Heads, tokenizer: Any) -> Vocabulary | None:
    """The tokens of a model that takes token ids; None for one that does not."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    config: Any = getattr(model, "config", None)
    facts = config.to_dict() if hasattr(config, "to_dict") else {}
    size = facts.get("vocab_size") or (heads.embedding_shape or (None,))[0]
    vocabulary = None if size is None else Vocabulary.of(int(size), tokenizer, facts)
    return vocabulary if vocabulary is not None and len(vocabulary.pool) > 1 else None
