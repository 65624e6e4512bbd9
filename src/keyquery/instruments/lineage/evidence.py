"""The two tests of kinship: similarities of all pairs of layers, their null, and a p-value.

*Basis-free*: spectra. The gaps between neighbouring singular values (of M, S and A) relative to the local mean gap, and
the energies of RoPE planes relative to their neighbours, correlate between two heads only if one comes from the other:
independent trainings may agree in the shape of a spectrum, not in its gaps. Null: the gaps of the other model, shifted
cyclically and reversed, which keeps their distribution and their neighbours; then heads of unrelated layers.

*Shared basis*: inner products ⟨M, N⟩/(‖M‖‖N‖) of the forms themselves. Null: the dimensions of the other model's
residual stream in random orders, to which training from another seed is indifferent: exact, unless both models have
dimensions of fixed meaning, such as a table of sinusoids that is added to the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.instruments.lineage.alignment import matched
from keyquery.instruments.lineage.fingerprint import Fingerprint, LayerPrint
from keyquery.instruments.lineage.significance import p_value, path_statistic, standardised

SHIFTS = 64  # of gaps and planes, random ones
IN_ORDER = 0.5  # of the similarity of matched heads, above which heads stand in their own order
FEWEST = 7  # gaps per spectrum


@dataclass(frozen=True)
class Evidence:
    """The result of one test."""

    test: str
    statistic: float  # standard deviations above the null, of the best path
    p: float
    path: list[int]  # our layer for each of theirs
    layers: list[float]  # z of each of their layers, with its source
    heads: list[list[int]]  # our head for each of theirs, per layer
    similarity: list[list[float]]  # of the matched heads
    reordered: bool  # whether heads match far better in another order than in their own
    table: list[list[float]]  # z of all pairs of layers

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dict(vars(self))


def basis_free(ours: Fingerprint, theirs: Fingerprint) -> Evidence | None:
    """The test on spectra; None where heads have different widths."""
    both = (*ours.layers, *theirs.layers)
    if min(layer.gaps.shape[-1] for layer in both) < FEWEST or len({layer.width for layer in both}) > 1:
        return None
    planes = len({None if layer.planes is None else layer.planes.shape[-1] for layer in both}) == 1
    kept = min(layer.gaps.shape[-1] for layer in both)  # an index keeps the first ones of large models
    mine, other = ([_blocks(layer, planes, kept) for layer in side.layers] for side in (ours, theirs))
    return _result("basis-free", _joined(mine), _joined(other), map(_joined, _shifts(other)))


def shared_basis(ours: Fingerprint, theirs: Fingerprint) -> Evidence | None:
    """The test on the forms themselves; None where the models have different widths. `theirs` has permuted sketches."""
    if len({layer.dim for side in (ours, theirs) for layer in side.layers}) > 1:
        return None
    mine, other = ([_unit(layer.sketch) for layer in side.layers] for side in (ours, theirs))
    numbers = range(len(theirs.layers[0].permuted))  # type: ignore[arg-type]
    null = ([_unit(layer.permuted[number]) for layer in theirs.layers] for number in numbers)  # type: ignore[index]
    return _result("shared basis", mine, other, null)


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def _blocks(layer: LayerPrint, planes: bool, kept: int) -> list[Float[Tensor, "heads sequences length"]]:
    """Sequences per head that are shifted under the null: gaps of four spectra, and energies of planes."""
    blocks = [layer.gaps[..., :kept]]
    if planes and layer.planes is not None:
        blocks.append(layer.planes[:, None])
    return blocks


def _shifts(layers: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """The null: sequences shifted cyclically, forwards or reversed; all spectra alike, planes by themselves."""
    draw = np.random.default_rng(0)
    for _ in range(SHIFTS):
        moves = [(int(draw.integers(2, block.shape[-1] - 1)), draw.random() < 0.5) for block in layers[0]]
        yield [
            [(b.flip(-1) if back else b).roll(shift, -1) for b, (shift, back) in zip(blocks, moves, strict=True)]
            for blocks in layers
        ]


def _joined(layers: Sequence[Sequence[Tensor]]) -> list[Float[Tensor, "heads features"]]:
    """One vector of length 1 per head."""
    return [_unit(torch.cat([block.flatten(1) for block in blocks], -1).float()) for blocks in layers]


def _result(test: str, mine: Sequence[Tensor], other: Sequence[Tensor], null: Iterable[Sequence[Tensor]]) -> Evidence:
    """Standardise every pair of layers by its null, find the best path, and compare it with the paths of the null.

    Each layer is a matrix of unit vectors, one per head; `null` repeats `other` with its features made unrelated.
    """
    similarity = _similarity(mine, other)
    scores = np.stack([_scores(table, mine, other) for table in (similarity, *(_similarity(mine, n) for n in null))])
    statistic, path, table = path_statistic(standardised(scores), centred=test == "basis-free")
    blocks = [rows.split([len(part) for part in other], 1) for rows in similarity.split([len(part) for part in mine])]
    pairs = [blocks[source][layer].double().cpu().numpy() for layer, source in enumerate(path)]
    heads = [matched(pair) for pair in pairs]
    found = [[float(pair[own, head]) for head, own in enumerate(row)] for pair, row in zip(pairs, heads, strict=True)]
    own_order = [float(pair[head % len(pair), head]) for pair in pairs for head in range(pair.shape[1])]
    reordered = np.mean(own_order) < IN_ORDER * np.mean([value for row in found for value in row])
    of_path = [float(table[source, layer]) for layer, source in enumerate(path)]
    p = p_value(test, statistic, len(path))
    return Evidence(test, statistic, p, path, of_path, heads, found, bool(reordered), table.tolist())


def _similarity(mine: Sequence[Tensor], other: Sequence[Tensor]) -> Float[Tensor, "ours theirs"]:
    """Cosines of all pairs of heads."""
    return torch.cat(list(mine)) @ torch.cat(list(other)).T


def _scores(
    similarity: Float[Tensor, "ours theirs"], mine: Sequence[Tensor], other: Sequence[Tensor]
) -> Float[np.ndarray, "our_layers their_layers"]:
    """The mean of the best similarities of each head, on both sides, for all pairs of layers."""
    starts = [np.cumsum([0, *(len(part) for part in side)])[:-1] for side in (mine, other)]
    counts = [np.array([len(part) for part in side]) for side in (mine, other)]
    cosines = similarity.cpu().numpy()

    def one_side(table: np.ndarray, own: int) -> np.ndarray:
        best = np.maximum.reduceat(table, starts[1 - own], axis=1)
        return np.add.reduceat(best.astype(float), starts[own], axis=0) / counts[own][:, None]

    both: np.ndarray = one_side(cosines, 0) + one_side(np.ascontiguousarray(cosines.T), 1).T
    return both / 2
