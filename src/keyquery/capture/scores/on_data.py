"""Run a model on data, and split the variance of every head's scores into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from keyquery.capture.hooks import Batch
from keyquery.capture.scores.cross import CrossMeans, CrossPairs, CrossVariance, listen_cross
from keyquery.capture.scores.pairs import ScoredPairs, watch_pairs
from keyquery.capture.scores.position_means import LEAST, PositionMeans
from keyquery.capture.scores.variance import FOLDS, ScoreVariance, Terms
from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.sources import OTHER_TOWERS
from keyquery.forms import Rope

SEQUENCES = 2 * FOLDS * LEAST  # needed for means by position: half of them for the means, in folds


def position_means(
    model: nn.Module, batches: Iterable[Batch], heads: Heads, folds: int = 1
) -> dict[int, PositionMeans]:
    """Mean (scaled) queries and keys by position of every self-attention layer, by layer index."""
    means: dict[int, PositionMeans] = {}
    count = 0

    def hear(layer: Layer, pairs: ScoredPairs) -> None:
        own = means.setdefault(layer.index, PositionMeans(folds))
        at = pairs.positions.expand(len(pairs.query), -1)
        fold = (torch.arange(len(pairs.query)) + count) % folds
        own.add(pairs.query, pairs.key, at, pairs.real, fold)

    with watch_pairs(model, heads, hear) as run:
        for batch in batches:
            run(batch)
            count += rows_of(batch)
    _require_heard(heads, means)
    return means


def score_variances(
    model: nn.Module, batches: Sequence[Batch], heads: Heads, watching: Callable[[Sequence[Batch]], Iterable[Batch]]
) -> dict[int, ScoreVariance]:
    """Second moments of the score parts of every attention layer that is called, by layer index.

    Half of the sequences are used for the means, the other half for the parts. With fewer than `SEQUENCES` sequences
    all are used for both, and means are over all positions.
    """
    first, second = halves(batches)
    by_position = sum(map(rows_of, first)) >= SEQUENCES // 2 and sum(map(rows_of, second)) >= SEQUENCES // 2
    order = [*first, *second] if by_position else [*batches, *batches]
    cut = len(first) if by_position else len(batches)
    turns = iter(watching(order))
    first_turns = (next(turns) for _ in range(cut))
    folds = FOLDS if by_position else 1
    cross: dict[int, CrossMeans] = {}
    count = 0

    def hear_means(layer: Layer, pairs: CrossPairs) -> None:
        fold = (torch.arange(len(pairs.query)) + count) % folds
        cross.setdefault(layer.index, CrossMeans(folds)).add(pairs, fold)

    def announced(batches: Iterable[Batch], announce: Callable[[Batch], None]) -> Iterator[Batch]:
        nonlocal count
        for batch in batches:
            announce(batch)
            yield batch
            count += rows_of(batch)

    with listen_cross(model, heads, hear_means) as announce:
        means = position_means(model, announced(first_turns, announce), heads, folds)
    sums: dict[int, ScoreVariance] = {
        layer.index: ScoreVariance(means[layer.index], rope, partial(heads.pair_bias, layer), _terms(heads, layer))
        for layer in heads
        if layer.index in means and ((rope := rotation(layer, batches)) is not None or layer.axial is None)
    }
    crossed = {index: CrossVariance(own, heads[index].rope) for index, own in cross.items()}
    count = 0

    def hear(layer: Layer, pairs: ScoredPairs) -> None:
        if layer.index not in sums:
            return
        numbers = [count + row for row in range(len(pairs.query))]
        sums[layer.index].add(pairs.query, pairs.key, pairs.positions, pairs.visible, numbers)

    def hear_cross(layer: Layer, pairs: CrossPairs) -> None:
        crossed[layer.index].add_pairs(pairs, [count + row for row in range(len(pairs.query))])

    with listen_cross(model, heads, hear_cross) as announce, watch_pairs(model, heads, hear) as run:
        for batch in announced(turns, announce):
            run(batch)
    return {**sums, **crossed}


def rotation(layer: Layer, batches: Sequence[Batch]) -> Rope | None:
    """The rotation of a layer's queries and keys by the numbers of tokens.

    On a grid it is known where all images are of one size; otherwise the layer is left out.
    """
    if layer.axial is None:
        return layer.rope
    layout = layer.axial.layout
    seen = {(layout.merged(batch), tuple(layout.sizes(batch) or ())) for batch in batches}
    layout, sizes = seen.pop()
    return replace(layer.axial, layout=layout).on(sizes) if sizes and not seen else None


def _terms(heads: Heads, layer: Layer) -> Terms:
    """Terms of positions for queries that are scaled."""
    return lambda queries, keys: [term.of_scaled(layer.scale) for term in heads.relatives(layer, queries, keys)]


def halves(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Every other batch; if that is uneven, every other row of each batch where possible.

    >>> [part[0]["x"].tolist() for part in halves([{"x": torch.arange(4)}])]
    [[0, 2], [1, 3]]
    """
    first, second = list(batches[0::2]), list(batches[1::2])
    counts = [sum(map(rows_of, part)) for part in (first, second)]
    rows = [(_rows(batch, 0), _rows(batch, 1)) for batch in batches]
    if min(counts) >= 0.8 * max(counts) or not all(even and odd for even, odd in rows):
        return first, second
    return [even for even, _ in rows if even], [odd for _, odd in rows if odd]


def _rows(batch: Batch, start: int) -> Batch | None:
    count = rows_of(batch)
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if count < 2 or any(value.ndim == 0 or len(value) != count for value in tensors.values()):
        return None
    return {**batch, **{name: value[start::2] for name, value in tensors.items()}}


def rows_of(batch: Batch) -> int:
    """Number of sequences in a batch."""
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0)


def _require_heard(heads: Heads, means: dict[int, PositionMeans]) -> None:
    silent = [layer.name for layer in heads if layer.on_data and layer.index not in means]
    if means:  # a model that also sees or hears may be run on text alone
        silent = [name for name in silent if not any(word in name for word in OTHER_TOWERS)]
    if silent:
        raise ValueError(f"{silent[0]} was never called: these inputs give no activations there")
