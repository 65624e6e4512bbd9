"""What a record holds of a head's structure, at a slower rhythm: effective ranks, and shares of its score variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.positions.relative import VECTORS
from keyquery.forms.core import eigenvalues
from keyquery.forms.measures import entropy_rank
from keyquery.forms.parts import PARTS
from keyquery.instruments.monitor.bound import product_core
from keyquery.instruments.monitor.layers import together
from keyquery.listening.call import Call
from keyquery.listening.parts.means import PositionMeans
from keyquery.listening.parts.on_data import SEQUENCES
from keyquery.listening.parts.pairs import ScoredPairs, scored_pairs
from keyquery.listening.parts.shares import jackknife
from keyquery.listening.parts.variance import FOLDS, POSITION, ROLES, products_of, stacked_parts

SHARES = ("symmetric", "skew", "popularity", "position")
CELLS = 2**22  # scores of one part in memory at a time, about: a training run leaves little room


@torch.no_grad()
def effective_ranks(layers: Mapping[str, Sequence[Layer]]) -> dict[str, Float64[Tensor, " heads"]]:
    """exp(−Σ p ln p), p = σ/Σσ, of every head by module; NaN where weights are not finite."""
    weights = {name: (layer.weights.query, layer.weights.key) for name, (layer, *_) in layers.items()}
    return together(_ranks, {name: (core,) for name, core in together(product_core, weights).items()})


def _ranks(cores: Float64[Tensor, "layers groups shared r r"]) -> Float64[Tensor, "layers heads"]:
    values = eigenvalues(cores.nan_to_num()).clamp(min=0).sqrt()
    ranks = entropy_rank(values, values.sum(-1) == 0)
    return ranks.masked_fill(~cores.isfinite().all(-1).all(-1), torch.nan).flatten(1)


@dataclass
class LayerSums:
    """Of one layer: means by position, and products of score parts per sequence."""

    means: PositionMeans = field(default_factory=lambda: PositionMeans(FOLDS))
    products: list[Float64[Tensor, "sequences heads parts parts"]] = field(default_factory=list)

    @property
    def counted(self) -> int:
        """Sequences whose parts are known."""
        return sum(map(len, self.products))


class Shares:
    """Shares of every head's score variance over the pairs of tokens that its model scores, as `kq.look` has them.

    Means by position are of other sequences than the parts: of every other one where a forward has enough of them, else
    of the first forwards of the step. With fewer than SEQUENCES there is no share.
    """

    def __init__(self) -> None:
        self._sums: dict[str, LayerSums] = {}

    @torch.no_grad()
    def add(self, name: str, heads: Heads, layer: Layer, tokens: Float[Tensor, "batch n d"], call: Call) -> None:
        """Add the tokens that entered a module in a forward, and their call."""
        fits = tokens.shape[-1] == layer.weights.query.shape[-1]
        if fits and layer.on_data and layer.axial is None and layer.position not in VECTORS:
            _add(self._sums.setdefault(name, LayerSums()), heads, layer, scored_pairs(layer, tokens.float(), call))

    def result(self) -> dict[str, dict[str, Tensor]]:
        """By module and part, one value per head."""
        shares: dict[str, dict[str, Tensor]] = {}
        for name, sums in self._sums.items():
            if sums.counted >= SEQUENCES // 2:
                products = torch.cat(sums.products)
                squares, total = products.diagonal(dim1=-2, dim2=-1), products.sum((-2, -1))
                shares[name] = {
                    part: jackknife(squares, total, itemgetter((..., PARTS.index(part)))).value for part in SHARES
                }
        return shares


def _add(sums: LayerSums, heads: Heads, layer: Layer, pairs: ScoredPairs) -> None:
    size, known = len(pairs.query), int(sums.means.sequences.sum())
    of_means, of_parts = slice(size), slice(0)
    if known >= SEQUENCES // 2:
        of_means, of_parts = of_parts, of_means
    elif not known and size >= SEQUENCES:
        of_means, of_parts = slice(0, None, 2), slice(1, None, 2)
    positions = pairs.positions.expand(size, -1)
    if len(positions[of_means]):
        fold = (torch.arange(len(positions[of_means])) + known) % FOLDS
        sums.means.add(pairs.query[of_means], pairs.key[of_means], positions[of_means], pairs.real[of_means], fold)
    n = pairs.query.shape[-2]
    rows = torch.arange(size)[of_parts]
    for some in rows.split(max(CELLS // (layer.heads * n * n), 1)) if len(rows) else ():
        sums.products.append(_products(sums.means, heads, layer, pairs, some, sums.counted))


def _products(
    means: PositionMeans, heads: Heads, layer: Layer, pairs: ScoredPairs, rows: Tensor, counted: int
) -> Float64[Tensor, "sequences heads parts parts"]:
    """Products of the parts of some sequences, with means of other sequences in two versions: see `ScoreVariance`."""
    query, key, n = pairs.query[rows], pairs.key[rows], pairs.query.shape[-2]
    positions = pairs.positions.expand(len(pairs.query), -1)[rows]
    by_fold = [means.at(positions, fold) for fold in range(FOLDS)]
    queries, keys = (torch.stack(side).to(query) for side in zip(*by_fold, strict=True))
    roles = torch.tensor([ROLES[(counted + row) % len(ROLES)] for row in range(len(rows))], device=query.device).T
    known = means.known[positions.clamp(max=len(means.known) - 1)] & (positions < len(means.known))
    visible = pairs.visible.expand(len(pairs.query), -1, -1, -1)[rows] & known[:, None, None] & known[:, None, :, None]
    slots = torch.arange(n, device=query.device)  # differences alone count
    bias = heads.pair_bias(layer, slots, slots)
    versions = []
    for role in (0, 2):
        each = torch.arange(len(rows), device=query.device)
        mean_query, mean_key = (queries[roles[role], each], keys[roles[role + 1], each])
        flat = [side.flatten(0, 1) for side in (query, key, mean_query, mean_key)]
        parts, _ = stacked_parts(flat[0], flat[1], flat[2], flat[3], slots, layer.rope)
        if bias is not None:
            parts[:, POSITION] += bias.to(parts).repeat(len(rows), 1, 1)
        versions.append(parts)
    seen = visible.expand(-1, layer.heads, -1, -1).flatten(0, 1)
    return products_of(versions[0], versions[1], seen)[0].unflatten(0, (len(rows), -1))
