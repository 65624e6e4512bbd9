"""The two tests of kinship: similarities of all pairs of layers, their null, the best path, and a p-value.

*Basis-free*: spectra. The gaps between neighbouring singular values (of M, S and A) relative to the local mean gap, and
the energies of RoPE planes relative to their neighbours, correlate between two heads only if one comes from the other:
independent trainings may agree in the shape of a spectrum, not in its gaps. Null: the gaps of the other model, shifted
cyclically and reversed, which keeps their distribution and their neighbours; then heads of unrelated layers.

*Shared basis*: inner products ⟨M, N⟩/(‖M‖‖N‖) of the forms themselves. Null: the dimensions of the other model's
residual stream in random orders, to which training from another seed is indifferent: exact, unless both models have
dimensions of fixed meaning, such as a table of sinusoids that is added to the stream.

Every pair of layers is standardised by its K replicates under the null, and the best path through the table, by which
each layer of the other model comes from one of ours, is compared with the best paths of the replicates. What unrelated
heads share in any case, such as the edges of a spectrum, shifts all cells of the observed table alike: the cells off
the best path, heads of unrelated layers, measure it, and it is subtracted, in the replicates as well. The p-value is
that of a gamma variable, since the best of many paths is skewed, with the tail of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.instruments.lineage.fingerprint import Fingerprint, LayerPrint
from keyquery.support.statistics import student_tail

SHIFTS = 64  # of gaps and planes, random ones
IN_ORDER = 0.5  # of the similarity of matched heads, above which heads stand in their own order
FEWEST = 7  # gaps per spectrum
JUMP = 3.0  # standard deviations that a jump between layers must gain: pruned and stacked models jump, others do not
# Location, scale and skewness of the statistic over unrelated pairs, and degrees of freedom of its tail. Basis-free:
# fitted to five configs together, see `keyquery study lineage`. Shared basis: the null is exact, so that its location
# and scale are 0 and 1, and there are 24 replicates; the skewness is that of the best path.
UNRELATED = {"basis-free": (0.17, 1.0, 0.7, 20), "shared basis": (0.0, 1.0, 0.3, 22)}
LAYERS = 4  # at which the location is the one above: layers of equal depth are a little alike, and it grows with them
SHIFT = 0.25  # of a cell of unrelated models, in standard deviations, where no other layers measure it
WEIGHT = 1.0  # of that, in cells


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
    """The best path of layers of unit vectors, standardised by `null`: `other` with its features made unrelated."""
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


def standardised(scores: Float[np.ndarray, "tables ours theirs"]) -> Float[np.ndarray, "tables ours theirs"]:
    """z of all cells; the first table is the observed one, the others are replicates of the null.

    Each cell has its own mean, all have one spread, since replicates are few. The mean is known from K replicates, of
    which the observed table is none: the deviations of replicates are made as large as if they were none either.
    """
    count = len(scores) - 1
    null = scores[1:]
    spread = math.sqrt(float(null.var(0, ddof=1).mean()) * (1 + 1 / count)) or 1e-12
    z = (scores - null.mean(0)) / spread
    z[1:] *= math.sqrt((count + 1) / (count - 1))
    return z


def path_statistic(
    z: Float[np.ndarray, "tables ours theirs"], centred: bool
) -> tuple[float, list[int], Float[np.ndarray, "ours theirs"]]:
    """The best path of the first table in standard deviations of those of the others, the path, and the table."""
    totals, paths = best_paths(z)
    if centred:
        on_path = np.zeros(z.shape, bool)
        on_path[np.arange(len(z))[:, None], paths, np.arange(z.shape[2])] = True
        sums, cells = np.where(on_path, 0.0, z).sum((1, 2)), z.shape[1] * z.shape[2] - z.shape[2]
        sums[0] += WEIGHT * SHIFT
        totals, paths = best_paths(z - (sums / (cells + WEIGHT))[:, None, None])
    null = totals[1:]
    spread = max(float(null.std(ddof=1)), 1e-12) * math.sqrt(1 + 1 / len(null))
    return float((totals[0] - null.mean()) / spread), paths[0].tolist(), z[0]


def p_value(test: str, statistic: float, layers: int = LAYERS) -> float:
    """The probability of so large a statistic between unrelated models, the second of which has so many layers."""
    location, scale, skewness, freedom = UNRELATED[test]
    location *= max(layers / LAYERS, 1.0)
    return student_tail(_normal_score((statistic - location) / scale, skewness), freedom)


def _normal_score(x: float, skewness: float) -> float:
    """Of a gamma variable with mean 0, variance 1 and this skewness: Wilson and Hilferty's cube root."""
    root = math.copysign(abs(1 + skewness * x / 2) ** (1 / 3), 1 + skewness * x / 2)
    return 6 / skewness * (root - 1) + skewness / 6


def p_text(p: float) -> str:
    """A p-value in words: beyond 1e-15 its calibration means nothing."""
    return f"{p:.1e}" if p > 1e-15 else "< 1e-15"


def best_paths(
    z: Float[np.ndarray, "tables ours theirs"],
) -> tuple[Float[np.ndarray, " tables"], Int[np.ndarray, "tables theirs"]]:
    """The largest sum of similarities less jumps, and its source of each layer, by dynamic programming, per table."""
    total, steps = z[:, :, 0], []
    for layer in range(1, z.shape[2]):
        steps.append(total)
        total = _extended(total, z[:, :, layer])
    row = np.arange(len(z))
    path = [total.argmax(-1)]
    for before in reversed(steps):
        source = path[-1]
        follows = (source > 0) & (before[row, source - 1] >= before.max(-1) - JUMP)
        path.append(np.where(follows, source - 1, before.argmax(-1)))
    return total.max(-1), np.stack(path[::-1], 1)


def _extended(total: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The best sums of paths that end at each of our layers, one of their layers further."""
    follow = np.concatenate((np.full_like(total[..., :1], -np.inf), total[..., :-1]), -1)
    return np.maximum(follow, total.max(-1, keepdims=True) - JUMP) + column


def matched(similarity: Float[np.ndarray, "ours theirs"]) -> list[int]:
    """Our head for each of their heads: the assignment of the largest total; with more of theirs, some occur twice."""
    from scipy.optimize import linear_sum_assignment

    ours, theirs = similarity.shape
    tiled = np.tile(similarity, (-(-theirs // ours), 1))
    _, rows = linear_sum_assignment(tiled.T, maximize=True)
    return [int(row) % ours for row in rows]
