"""The model, the head and the sequence that are attributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.sources import bare
from keyquery.intervene.rewrites import check_unchanged
from keyquery.intervene.selection import select
from keyquery.listening.hooks import Batch
from keyquery.listening.inputs.batches import without_padding
from keyquery.listening.inputs.data import Data, Prepared
from keyquery.listening.inputs.load import in_float32
from keyquery.listening.inputs.word_pieces import token_text
from keyquery.listening.residual.tracing import stem_of
from keyquery.support.checks import check_count
from keyquery.support.progress import Progress, silent


def running(source: str | Path | nn.Module, data: Data, progress: Progress | None) -> Prepared:
    """The live model, in float32 if it is loaded here, and its batches; none has run."""
    if data.text is None and data.inputs is None:
        raise ValueError("pass text or inputs: heads attend on data only")
    if isinstance(source, nn.Module):
        source = bare(source)
        check_unchanged(source)
    prepared = data.load(source, progress or silent)
    return prepared if isinstance(source, nn.Module) else replace(prepared, model=in_float32(prepared.model))


def facts_of(source: str | Path | nn.Module, heads: Heads, name: str | None) -> dict[str, Any]:
    """Facts of a model for a reading, with the name that was passed, or that of its file."""
    name = name if name or isinstance(source, nn.Module) else Path(source).name
    return heads.model | ({"name": name} if name else {})


def attention_layers(heads: Heads) -> dict[str, list[Layer]]:
    """Self-attention layers by the label of their module; the two kernels of an MLA layer are together."""
    groups: dict[str, list[Layer]] = {}
    for layer in heads:
        if layer.kind == "self":
            groups.setdefault(stem_of(layer), []).append(layer)
    if not groups:
        raise ValueError("the model has no self-attention layer")
    return groups


def layers_of_head(heads: Heads, head: str | tuple[int, int]) -> tuple[list[Layer], int]:
    """The layers whose kernels a head's score is the sum of, and its number; raises unless one head is named."""
    groups = attention_layers(heads)
    stem, _, text = head.strip().rpartition(".") if isinstance(head, str) else ("", "", "")
    if stem in groups and text.isdecimal():
        head = (groups[stem][-1].index, int(text))
    known = {layers[-1].index: range(layers[-1].heads) for layers in groups.values()}
    chosen = [(index, n) for index, numbers in select(head, known, heads.labels()).items() for n in numbers]
    if len(chosen) != 1:
        raise ValueError(f'head must name one head, such as "3.1", got {head!r}')
    index, number = chosen[0]
    return groups[stem_of(heads[index])], number


def tokens_in(batch: Batch) -> Tensor:
    """The first tensor (batch, tokens, …) of a batch."""
    ids = next((t for t in batch.values() if isinstance(t, Tensor) and t.ndim > 1), None)
    if ids is None:
        raise ValueError("inputs must hold tensors (batch, tokens, …)")
    return ids


def texts_of(batch: Batch, n: int, tokenizer: Any) -> list[list[str]]:
    """Names of the n tokens of each sequence; positions where they have no ids."""
    named = (batch.get(name) for name in ("input_ids", "decoder_input_ids"))
    ids = next((t for t in named if isinstance(t, Tensor) and t.shape[-1] == n), None)
    if ids is None:
        return [[str(position) for position in range(n)] for _ in tokens_in(batch)]
    return [[token_text(number, tokenizer) for number in row] for row in ids.tolist()]


def sequence_of(batches: Sequence[Batch], number: int) -> Batch:
    """One sequence of the data without its padding, as a batch."""
    rows = [(batch, row) for batch in batches for row in range(len(tokens_in(batch)))]
    check_count("sequence", number, 0, len(rows) - 1)
    return without_padding(*rows[number])
