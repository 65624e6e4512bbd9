"""`attribute`: why a head attends from one token to another, as a table of sources that sums to its score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from keyquery.instruments.attribution.paths import unfolded
from keyquery.instruments.attribution.table import Features, HeadScores, largest_pairs
from keyquery.instruments.attribution.target import facts_of, layers_of_head, running, sequence_of, texts_of
from keyquery.listening.hooks import Batch
from keyquery.listening.inputs.batches import LENGTH
from keyquery.listening.inputs.data import Data
from keyquery.listening.live import live_heads
from keyquery.listening.residual.recording import recording
from keyquery.listening.residual.tracing import stem_of
from keyquery.reading import Reading, digests, provenance, short
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import Progress

DIGITS = 8  # significant digits kept of an entry
PAIRS = 10  # pairs of tokens that are listed
SIDES = ("query", "key")


@dataclass(frozen=True, kw_only=True)
class Attribution(Reading, kind="attribution"):
    """The score of one head by source on the query side and on the key side.

    Of one pair of tokens, `table` holds "raw", which sums to the model's score, "relative" to the mean over the visible
    keys, which is what softmax sees, and its "symmetric" part; of all pairs, "share" of the score variance.
    """

    units: ClassVar[Mapping[str, str]] = {
        "raw": "scaled score before a soft-cap; entries sum to the model's own",
        "relative": "raw minus its mean over the visible keys of the query",
        "symmetric": "part of relative that stays when query and key token change places; skew is the rest",
        "share": "covariance with the score over the visible pairs, of its variance; they sum to 1",
        "null": "95th percentile of the magnitude of a source's sum over the other side, relative or share, with its "
        "tokens in random order",
        "without": "attention with a source taken out of queries or keys, norms frozen",
        "random": "attention with a random write of the same size taken out instead",
        "contribution": "raw: of a path, what the head wrote; of a step, what it moved from that token",
    }

    model: Mapping[str, Any]  # name and facts of the model
    head: str  # "layer.head"
    tokens: Sequence[str]  # of the sequence
    sources: Sequence[str]  # what wrote to the residual stream: embedding, heads, MLPs, biases
    table: Mapping[str, Any]  # by view: sources of the query × sources of the key
    query: int | None = None  # position of the query; None: all pairs
    key: int | None = None  # position of the key
    null: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by side, in the order of the sources
    weight: float | None = None  # attention of the query to the key
    pairs: Sequence[Mapping[str, Any]] = ()  # of the text, those with the largest relative scores
    paths: Sequence[Mapping[str, Any]] = ()  # with depth 2, the largest relative score first
    ablated: Mapping[str, Any] | None = None  # a source taken out of one side, and the attention of pairs
    notes: Sequence[str] = field(default_factory=list)  # what a reader should know

    @property
    def score(self) -> float | None:
        """The model's score of the pair: the sum of all raw entries."""
        return float(np.sum(self.table["raw"])) if "raw" in self.table else None

    def by_source(self, side: str, view: str | None = None) -> dict[str, float]:
        """Entries summed over the other side, largest magnitude first."""
        check_choice("side", side, SIDES)
        view = view or next(name for name in ("relative", "share") if name in self.table)
        check_choice("view", view, tuple(self.table))
        sums = np.asarray(self.table[view]).sum(1 if side == "query" else 0)
        order = np.argsort(-np.abs(sums), kind="stable")
        return {self.sources[index]: float(sums[index]) for index in order}

    def records(self) -> list[dict[str, Any]]:
        """One row per query-side and key-side source, largest first."""
        tables = {name: np.asarray(values) for name, values in self.table.items()}
        if "relative" in tables:
            tables["skew"] = tables["relative"] - tables["symmetric"]
        main = tables["share" if "share" in tables else "relative"]
        order = np.argsort(-np.abs(main), axis=None)
        return [
            {
                "query_source": self.sources[a],
                "key_source": self.sources[b],
                **{name: float(values[a, b]) for name, values in tables.items()},
            }
            for a, b in np.transpose(np.unravel_index(order, main.shape))
        ]

    def __repr__(self) -> str:
        where = "all pairs" if self.query is None else f"{self.query} to {self.key}"
        return f"Attribution({self.model['name']}: {self.head}, {where}, {len(self.sources)} sources)"


def attribute(
    source: str | Path | nn.Module,
    text: str | Path | None = None,
    *,
    head: str | tuple[int, int],
    query: int | None = None,
    key: int | None = None,
    inputs: Batch | Iterable[Batch] | None = None,
    depth: int = 1,
    without: str | None = None,
    side: str = "key",
    features: Features | None = None,
    sequence: int = 0,
    length: int = LENGTH,
    tokenizer: Any = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Attribution:
    """Attribute the score of a head to what the model wrote into the residual stream.

    The residual stream is a sum of writes: embeddings, every earlier head, every MLP, biases. With the norms frozen at
    their recorded values, the score of query i and key j is

        s(i, j) = Σ_a Σ_b w_a(i)ᵀ M(Δ) w_b(j),

    one entry for each pair of a query-side source a and a key-side source b.

    Parameters
    ----------
    source
        A folder, a .gguf file or a live model.
    text, inputs
        A text file, one sequence per line, or batches of input tensors.
    head
        "LAYER.HEAD", or a pair.
    query, key
        Positions of the query and the key token. Default: all pairs of the sequence; with `query` alone, the key that
        it attends to most.
    depth
        With 2, the three heads of largest relative score on each side are followed along their own attention, to the
        three tokens from which they moved most, in raw contributions. Default: 1.
    without, side
        Ablate a path: take this source out of the head's keys (or queries) alone, norms frozen, and report the
        attention of the pair, or of the largest pairs, beside that without a random write of its size. Default: none,
        and "key".
    features
        {name: (direction (d,), activation (n,))} in the input of the head's block, such as probes or SAE features: they
        are the sources then, and the rest is "other". Default: none.
    sequence, length
        Which sequence of the data; `text` is cut into windows of `length` tokens. Default: 0 and 128.
    tokenizer, name, progress
        For `text`; name of the model; progress bars. Default: those stored with the model, and none.

    Returns
    -------
    Attribution
        The table, its largest pairs of tokens and, at depth 2, paths.

    Examples
    --------
    >>> model = kq.Decoder(8, depth=2, heads=2).eval()
    >>> reading = kq.attribute(model, inputs={"x": torch.randn(1, 5, 8)}, head="1.0", query=4, key=2)
    >>> list(reading.sources)
    ['input embedding', '0.0', '0.1', 'bias', 'mlp 0']
    """
    _check(query, key, depth, features, sequence)
    check_choice("side", side, SIDES)
    data = Data(text=text, inputs=inputs, tokenizer=tokenizer, length=length, tokens=(sequence + 1) * length)
    prepared = running(source, data, progress)
    model = prepared.model
    heads = live_heads(model, prepared.batches[0])
    layers, number = layers_of_head(heads, head)
    label = f"{stem_of(layers[0])}.{number}"
    batch = sequence_of(prepared.batches, sequence)
    with recording(model, heads, layers) as run:
        record = run(batch)
    scores = HeadScores.of(record, heads, layers, number, features)
    pair = _pair(scores, label, query, key)
    tables = {"share": scores.shares()} if pair is None else scores.pair(*pair)
    weights = scores.weights()
    paths = unfolded(record, scores, pair, tables["relative"]) if pair and depth == 2 else []
    pairs = _largest(scores, weights)
    shown = [(row["query"], row["key"]) for row in pairs] if pair is None else [pair]
    return Attribution(
        model=facts_of(source, heads, name),
        head=label,
        tokens=texts_of(batch, len(weights), prepared.tokenizer)[0],
        sources=scores.sources,
        table={view: short(table.tolist(), DIGITS) for view, table in tables.items()},
        query=None if pair is None else pair[0],
        key=None if pair is None else pair[1],
        null={of: short(levels.tolist(), DIGITS) for of, levels in scores.null_levels(pair).items()},
        weight=None if pair is None else float(weights[pair]),
        pairs=pairs,
        ablated=None if without is None else scores.ablated(without, side, shown),
        paths=short(paths, DIGITS),
        notes=list(dict.fromkeys(note for layer in layers for note in layer.notes)),
        provenance=provenance(
            text=prepared.origin, sequence=sequence, length=length, tensors=digests(model.state_dict())
        ),
    )


def _check(query: Any, key: Any, depth: Any, features: Any, sequence: Any) -> None:
    for name, value in (("query", query), ("key", key)):
        check_count(name, value, least=0, optional=True)
    if key is not None and query is None:
        raise ValueError("key needs query: the token that attends to it")
    check_count("depth", depth, 1, 2)
    check_count("sequence", sequence, least=0)
    if depth == 2 and query is None:
        raise ValueError("depth 2 follows one pair of tokens: pass query")
    if features is not None and depth == 2:
        raise ValueError("depth 2 unfolds heads, and with features the sources are features: pass one of both")


def _pair(scores: HeadScores, head: str, query: int | None, key: int | None) -> tuple[int, int] | None:
    if query is None:
        return None
    last = len(scores.visible) - 1
    for name, value in (("query", query), ("key", key)):
        check_count(name, value, 0, last, optional=True)
    if key is None:
        key = int(scores.weights()[query].argmax())
    if not scores.visible[query, key]:
        why = "it comes after the query" if key > query else "it is outside of the window"
        raise ValueError(f"key {key} is not visible to query {query} in {head}: {why}")
    return query, key


def _largest(scores: HeadScores, weights: Tensor) -> list[dict[str, Any]]:
    """The pairs with the largest relative scores, and the key-side source that adds most to each."""
    queries, keys, seen = scores.queries.sum(0), scores.keys, scores.visible
    rows = []
    for pair in largest_pairs(scores.scores[None], seen[None], PAIRS):
        i, j = pair["query"], pair["key"]
        by_source = (keys[:, j] - keys[:, seen[i]].mean(1)) @ queries[i]
        source = {"key_source": scores.names[int(by_source.argmax())], "from_source": float(by_source.max())}
        rows.append({"query": i, "key": j, "relative": pair["relative"], "weight": float(weights[i, j]), **source})
    return rows
