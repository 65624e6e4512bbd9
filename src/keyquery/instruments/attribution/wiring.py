"""`wiring`: which earlier heads and MLPs feed the queries and the keys of every head, over a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.instruments.attribution.table import largest_pairs
from keyquery.instruments.attribution.target import attention_layers, facts_of, running, texts_of, tokens_in
from keyquery.instruments.attribution.variance import Sums, WiringSums
from keyquery.listening.hooks import Batch
from keyquery.listening.inputs.batches import LENGTH, TOKENS
from keyquery.listening.inputs.data import Data
from keyquery.listening.live import live_heads
from keyquery.listening.parts.on_data import rows_of
from keyquery.listening.residual.kernels import Kernel
from keyquery.listening.residual.recording import Recording, recording, sources_of
from keyquery.reading import Reading, digests, provenance, short
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import Progress, silent
from keyquery.support.statistics import student

MEMORY = 2**28  # bytes of writes that are held at a time
DIGITS = 5  # significant digits kept of a share
SHOWN = 3  # sources of a head and side with examples
PAIRS = 3  # of tokens in an example
SIDES = ("query", "key")


@dataclass(frozen=True, kw_only=True)
class Wiring(Reading, kind="wiring"):
    """Shares of the variance of every head's scores by the source of its queries, and of its keys.

    `heads` hold, per side, `share` with its 95 % interval over sequences `low` to `high`, and `null`: the upper end of
    that interval with the tokens of the source in random order, at least 0; in the order of the layer's `sources`.
    """

    units: ClassVar[Mapping[str, str]] = {
        "share": "covariance of the source's part with the score over visible pairs, of its variance; they sum to 1",
        "null": "upper end of the 95 % interval of the share with the source's tokens in random order, at least 0",
        "relative": "what the source adds to a score, minus its mean over the visible keys",
    }

    model: Mapping[str, Any]  # name and facts of the model
    sequences: int  # that were run
    tokens: int  # in all
    layers: Sequence[Mapping[str, Any]]  # label and sources
    heads: Sequence[Mapping[str, Any]]  # per head and side: shares, intervals and null levels
    texts: Sequence[Sequence[str]] = ()  # the sequences that examples are from
    examples: Sequence[Mapping[str, Any]] = ()  # pairs of tokens with the largest relative scores
    notes: Sequence[str] = field(default_factory=list)  # what a reader should know

    def __repr__(self) -> str:
        return f"Wiring({self.model['name']}: {len(self.heads)} heads, {self.sequences} sequences)"

    def records(self) -> list[dict[str, Any]]:
        """One row per head, side and source."""
        sources = {layer["layer"]: layer["sources"] for layer in self.layers}
        return [
            {"head": head["name"], "side": side, **row}
            for head in self.heads
            for side in SIDES
            for row in _rows(head[side], sources[head["layer"]])
        ]

    def of(self, head: str, side: str = "key") -> list[dict[str, Any]]:
        """The sources of one head, largest share first; `clear` where the interval is above the null."""
        check_choice("side", side, SIDES)
        check_choice("head", head, [row["name"] for row in self.heads])
        chosen = next(row for row in self.heads if row["name"] == head)
        sources = next(layer["sources"] for layer in self.layers if layer["layer"] == chosen["layer"])
        return sorted(_rows(chosen[side], sources), key=lambda row: -row["share"])


def _rows(side: Mapping[str, Any], sources: Sequence[str]) -> list[dict[str, Any]]:
    """The sources of one side of a head."""
    columns = zip(sources, *(side[name] for name in ("share", "low", "high", "null")), strict=True)
    rows = [dict(zip(("source", "share", "low", "high", "null"), row, strict=True)) for row in columns]
    return [{**row, "clear": row["low"] > row["null"]} for row in rows]


def wiring(
    source: str | Path | nn.Module,
    text: str | Path | None = None,
    *,
    inputs: Batch | Iterable[Batch] | None = None,
    length: int = LENGTH,
    tokens: int = TOKENS,
    seed: int = 0,
    tokenizer: Any = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Wiring:
    """Measure which writes into the residual stream feed every head: the wiring of a model.

    The share of source b on the key side is cov(q_i·k_b(j), s_ij)/var(s_ij) over the pairs that the model scores, with
    scores relative to the mean over the visible keys; likewise on the query side. The shares of all sources sum to 1.

    Parameters
    ----------
    source
        A folder, a .gguf file or a live model.
    text, inputs
        A text file, one sequence per line, or batches of input tensors; at least two sequences.
    length, tokens
        `text` is cut into windows of `length` tokens, at most `tokens` in total. Default: 128 and 20,000.
    seed
        Of the random orders of the null. Default: 0.
    tokenizer, name, progress
        For `text`; name of the model; progress bars. Default: those stored with the model, and none.

    Returns
    -------
    Wiring
        Shares with intervals over sequences and null levels, per head and side, and examples. Memory does not grow
        with the number of tokens.

    Examples
    --------
    >>> model = kq.Decoder(8, depth=2, heads=2).eval()
    >>> reading = kq.wiring(model, inputs=[{"x": torch.randn(4, 6, 8)}])
    >>> reading
    Wiring(Decoder: 4 heads, 4 sequences)
    """
    check_count("seed", seed, least=0)
    data = Data(text=text, inputs=inputs, tokenizer=tokenizer, length=length, tokens=tokens)
    prepared, watching = running(source, data, progress), progress or silent
    model = prepared.model
    heads = live_heads(model, prepared.batches[0])
    groups = attention_layers(heads)
    batches = list(_in_memory(prepared.batches, heads))
    sequences = sum(map(rows_of, batches))
    if sequences < 2:
        raise ValueError("an interval over sequences needs at least two: use more text or a smaller length")
    sums = WiringSums(torch.Generator().manual_seed(seed))
    with recording(model, heads) as run:
        for batch in watching(batches, "following the residual stream", len(batches)):
            sums.add(run(batch), heads, groups)
        record = run(batches[0])
    measured: list[dict[str, Any]] = []
    examples: list[dict[str, Any]] = []
    for label, layers in groups.items():
        rows = _heads(label, layers[0].heads, sums.layers[label])
        examples += _examples(record, layers, rows, sums.layers[label].sources)
        measured += rows
    return Wiring(
        model=facts_of(source, heads, name),
        sequences=sequences,
        tokens=sum(map(_count, batches)),
        layers=[{"layer": label, "sources": sums.layers[label].sources} for label in groups],
        heads=short(measured, DIGITS),
        texts=texts_of(batches[0], tokens_in(batches[0]).shape[1], prepared.tokenizer),
        examples=short(examples, DIGITS),
        notes=list(dict.fromkeys(note for layers in groups.values() for layer in layers for note in layer.notes)),
        provenance=provenance(text=prepared.origin, length=length, seed=seed, tensors=digests(model.state_dict())),
    )


def _in_memory(batches: Sequence[Batch], heads: Heads) -> Iterator[Batch]:
    """Batches of as few sequences as the memory for their writes allows."""
    width = heads[0].weights.query.shape[-1]
    writes = sum(layer.heads + 4 for layer in heads) + 8  # at least: heads, MLPs, biases and embeddings
    for batch in batches:
        count, n = tokens_in(batch).shape[:2]
        rows = max(1, MEMORY // (4 * writes * width * n))
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            yield {key: t[part] if isinstance(t, Tensor) and t.ndim else t for key, t in batch.items()}


def _count(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if isinstance(mask, Tensor) else tokens_in(batch).shape[:2].numel()


def _heads(label: str, count: int, sums: Sums) -> list[dict[str, Any]]:
    """Shares of the heads of a layer, by side."""
    share, error = sums.shares()
    width = student(sums.sequences - 1) * error
    low, high = share - width, share + width
    null = high[1].clamp(min=0)  # a negative share is never above its null
    tables = {"share": share[0], "low": low[0], "high": high[0], "null": null}  # sources by query heads and key heads
    rows = []
    for head in range(count):
        row: dict[str, Any] = {"name": f"{label}.{head}", "layer": label}
        for side, column in (("query", head), ("key", count + head)):
            row[side] = {name: table[:, column].tolist() for name, table in tables.items()}
        rows.append(row)
    return rows


def _examples(
    record: Recording, layers: Sequence[Layer], rows: Sequence[Mapping[str, Any]], known: Sequence[str]
) -> list[dict[str, Any]]:
    """Of each head of a layer and side, for its largest sources above their null: the pairs to which they add most."""
    entered, visible = record.of(layers[0]), record.pairs[layers[0].index].visible
    tokens, sources = entered.tokens.float(), sources_of(entered, layers[0].name)
    examples = []
    for head, row in enumerate(rows):
        kernels = [Kernel.of(layer, tokens, record.pairs[layer.index], head) for layer in layers]
        for side in SIDES:
            clear = sorted((cell for cell in _rows(row[side], known) if cell["clear"]), key=lambda cell: -cell["share"])
            for source in (cell["source"] for cell in clear[:SHOWN]):
                if source in sources:
                    added = _added(kernels, sources[source], tokens, side)
                    seen = visible[:, head if visible.shape[1] > 1 else 0].expand_as(added)
                    pairs = largest_pairs(added, seen, PAIRS)
                    examples.append({"head": row["name"], "side": side, "source": source, "pairs": pairs})
    return examples


def _added(
    kernels: Sequence[Kernel], source: Float[Tensor, "batch n d"], tokens: Float[Tensor, "batch n d"], side: str
) -> Float[Tensor, "batch n n"]:
    """What a source adds to every score through the queries, or through the keys."""
    of_query, of_key = (source, tokens) if side == "query" else (tokens, source)
    total = torch.zeros(())
    for kernel in kernels:
        query = kernel.queries(of_query[None], torch.tensor([float(side == "key")]))[0, :, 0]
        key = kernel.keys(of_key[None], torch.tensor([float(side == "query")]))[0, :, 0]
        total = total + query @ key.mT
    return total
