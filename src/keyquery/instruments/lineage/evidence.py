"""The two tests of kinship: similarities of all pairs of layers, their null, and a p-value.

*Basis-free*: spectra. The gaps between neighbouring singular values (of M, S and A) relative to the local mean gap, and
the energies of RoPE planes relative to their neighbours, correlate between two heads only if one comes from the other:
independent trainings may agree in the shape of a spectrum, not in its gaps. Null: the gaps of the other model, shifted
cyclically and reversed, which keeps their distribution and their neighbours.

*Shared basis*: inner products ⟨M, N⟩/(‖M‖‖N‖) of the forms themselves. Null: the dimensions of the other model's
residual stream in random orders, to which training from another seed is indifferent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.instruments.lineage.alignment import best_path, best_totals, matched
from keyquery.instruments.lineage.fingerprint import Fingerprint, LayerPrint
from keyquery.support.statistics import student_tail

# Mean and spread of the statistic over 496 pairs of models of one config, trained from different seeds; its tails are
# those of Student's t, since the null has few replicates. See `bench/lineage.py`.
UNRELATED = {"basis-free": (0.66, 1.2), "shared basis": (0.0, 1.1)}
FREEDOM = 10
SHIFTS = 32  # of the gaps, in either direction, at most
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
    """The null: sequences shifted cyclically, forwards and reversed."""
    longest = max(block.shape[-1] for block in layers[0])
    for shift in np.unique(np.linspace(2, longest - 2, min(SHIFTS, longest - 3)).round().astype(int)).tolist():
        for backwards in (False, True):
            yield [
                [(b.flip(-1) if backwards else b).roll(shift % b.shape[-1] or 1, -1) for b in blocks]
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
    spread = math.sqrt(float(scores[1:].var(0).mean())) or 1e-12  # one for all pairs: few shifts each
    z = (scores - scores[1:].mean(0)) / spread
    total, path = best_path(z[0])
    others = best_totals(z[1:])
    statistic = (total - float(others.mean())) / max(float(others.std(ddof=1)), 1e-12)
    blocks = [rows.split([len(part) for part in other], 1) for rows in similarity.split([len(part) for part in mine])]
    pairs = [blocks[source][layer].double().cpu().numpy() for layer, source in enumerate(path)]
    heads = [matched(pair) for pair in pairs]
    found = [[float(pair[own, head]) for head, own in enumerate(row)] for pair, row in zip(pairs, heads, strict=True)]
    own_order = [float(pair[head % len(pair), head]) for pair in pairs for head in range(pair.shape[1])]
    reordered = np.mean(own_order) < IN_ORDER * np.mean([value for row in found for value in row])
    of_path = [float(z[0][source, layer]) for layer, source in enumerate(path)]
    return Evidence(
        test, statistic, p_value(test, statistic), path, of_path, heads, found, bool(reordered), z[0].tolist()
    )


def _similarity(mine: Sequence[Tensor], other: Sequence[Tensor]) -> Float[Tensor, "ours theirs"]:
    """Cosines of all pairs of heads."""
    return torch.cat(list(mine)) @ torch.cat(list(other)).T


def _scores(
    similarity: Float[Tensor, "ours theirs"], mine: Sequence[Tensor], other: Sequence[Tensor]
) -> Float[np.ndarray, "our_layers their_layers"]:
    """The mean of the best similarities of each head, on both sides, for all pairs of layers."""

    def one_side(cosines: Tensor, own: Sequence[Tensor], partners: Sequence[Tensor]) -> Tensor:
        best = torch.stack([part.amax(1) for part in cosines.split([len(part) for part in partners], 1)], 1)
        return torch.stack([part.mean(0) for part in best.split([len(part) for part in own])])

    both = one_side(similarity, mine, other) + one_side(similarity.T, other, mine).T
    return both.double().cpu().numpy() / 2


def p_value(test: str, statistic: float) -> float:
    """The probability of so large a statistic between unrelated models.

    >>> round(p_value("shared basis", 1.1 * 2.228), 3)  # the 97.5 % quantile of Student's t for ν = 10
    0.025
    """
    mean, spread = UNRELATED[test]
    return student_tail((statistic - mean) / spread, FREEDOM)
