"""Run a model on data, and split the variance of every head's scores into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.sources import OTHER_TOWERS
from keyquery.forms import Rope
from keyquery.listening.hooks import Batch
from keyquery.listening.parts.means import PER_FOLD, PositionMeans
from keyquery.listening.parts.pairs import ScoredPairs, require_called, watch_pairs
from keyquery.listening.parts.variance import FOLDS, ScoreVariance, Terms

SEQUENCES = 2 * FOLDS * PER_FOLD  # needed for means by position: half of them for the means, in folds


def position_means(
    model: nn.Module,
    batches: Iterable[Batch],
    heads: Heads,
    folds: int = 1,
    key_means: dict[int, PositionMeans] | None = None,
) -> dict[int, PositionMeans]:
    """Mean (scaled) queries and keys by position of every self-attention layer, by layer index.

    With `key_means` also of cross-attention, whose keys have means of their own.
    """
    means: dict[int, PositionMeans] = {}
    count = 0

    def add(layer: Layer, pairs: ScoredPairs) -> None:
        size = len(pairs.query)
        fold = (torch.arange(size) + count) % folds
        positions, key_positions = (side.expand(size, -1) for side in (pairs.positions, pairs.key_positions))
        of_layer = means.setdefault(layer.index, PositionMeans(folds))
        if layer.kind == "self" or key_means is None:
            of_layer.add(pairs.query, pairs.key, positions, pairs.real, fold)
            return
        of_layer.add(pairs.query, pairs.query, positions, pairs.real, fold)
        of_keys = key_means.setdefault(layer.index, PositionMeans(folds))
        of_keys.add(pairs.key, pairs.key, key_positions, pairs.real_key, fold)

    with watch_pairs(model, heads, add, cross=key_means is not None) as run:
        for batch in batches:
            run(batch)
            count += rows_of(batch)
    silent = [layer for layer in heads if layer.on_data and layer.index not in means]
    if means:  # a model that also sees or hears may be run on text alone
        silent = [layer for layer in silent if not any(word in layer.name for word in OTHER_TOWERS)]
    require_called(silent, means)
    return means


def score_variances(
    model: nn.Module, batches: Sequence[Batch], heads: Heads, watching: Callable[[Sequence[Batch]], Iterable[Batch]]
) -> dict[int, ScoreVariance]:
    """Second moments of the score parts of every attention layer that is called, by layer index; self-attention first.

    Every other sequence is used for the means, the rest for the parts, however they are batched. With fewer than
    `SEQUENCES` sequences all are used for both, and means are over all positions.
    """
    first, second = halves(batches)
    by_position = sum(map(rows_of, first)) >= SEQUENCES // 2 and sum(map(rows_of, second)) >= SEQUENCES // 2
    order = [*first, *second] if by_position else [*batches, *batches]
    turns = iter(watching(order))
    first_turns = (next(turns) for _ in range(len(first) if by_position else len(batches)))
    key_means: dict[int, PositionMeans] = {}
    means = position_means(model, first_turns, heads, FOLDS if by_position else 1, key_means)
    sums = {
        layer.index: ScoreVariance(means[layer.index], rope, partial(heads.pair_bias, layer), score_terms(heads, layer))
        for layer in heads
        if layer.index in means.keys() - key_means.keys()
        and ((rope := rotation(layer, batches)) is not None or layer.axial is None)
    }
    for index in key_means:
        sums[index] = ScoreVariance(means[index], heads[index].rope, key_means=key_means[index])
    count = 0

    def add(layer: Layer, pairs: ScoredPairs) -> None:
        if layer.index in sums:
            sums[layer.index].add(pairs, [count + row for row in range(len(pairs.query))])

    with watch_pairs(model, heads, add, cross=bool(key_means)) as run:
        for batch in turns:
            run(batch)
            count += rows_of(batch)
    return sums


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


def score_terms(heads: Heads, layer: Layer) -> Terms:
    """Terms of positions for queries that are scaled."""
    return lambda queries, keys: [term.of_scaled(layer.scale) for term in heads.relatives(layer, queries, keys)]


def halves(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Every other sequence of all batches; a batch whose tensors cannot be divided by sequence goes to one half."""
    parts: tuple[list[Batch], list[Batch]] = [], []
    number = 0
    for batch in batches:
        count = rows_of(batch)
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        if count == 1 or any(value.ndim == 0 or len(value) != count for value in tensors.values()):
            parts[number % 2].append(batch)
        else:
            for row in (0, 1):
                parts[(number + row) % 2].append({**batch, **{name: value[row::2] for name, value in tensors.items()}})
        number += count
    return parts


def rows_of(batch: Batch) -> int:
    """Number of sequences in a batch."""
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0)
