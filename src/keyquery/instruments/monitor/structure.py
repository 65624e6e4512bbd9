"""What a record holds of a head's structure, at a slower rhythm: effective ranks, and shares of its score variance."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
from keyquery.listening.parts.variance import FOLDS, ScoreVariance

SHARES = ("symmetric", "skew", "popularity", "position")


@torch.no_grad()
def effective_ranks(layers: Mapping[str, Layer]) -> dict[str, Float64[Tensor, " heads"]]:
    """exp(−Σ p ln p), p = σ/Σσ, of every head by module; NaN where weights are not finite."""
    weights = {name: (layer.weights.query, layer.weights.key) for name, layer in layers.items()}
    return together(_ranks, {name: (core,) for name, core in together(product_core, weights).items()})


def _ranks(cores: Float64[Tensor, "layers groups shared r r"]) -> Float64[Tensor, "layers heads"]:
    values = eigenvalues(cores.nan_to_num()).clamp(min=0).sqrt()
    ranks = entropy_rank(values, values.sum(-1) == 0)
    return ranks.masked_fill(~cores.isfinite().all(-1).all(-1), torch.nan).flatten(1)


class Shares:
    """Shares of every head's score variance over the pairs of tokens that its model scores, as `kq.look` has them.

    Means by position are of other sequences than the parts: of every other one where a forward has enough of them, else
    of the first forwards of the step. With fewer than SEQUENCES there is no share.
    """

    def __init__(self) -> None:
        self._sums: dict[str, ScoreVariance] = {}

    @torch.no_grad()
    def add(self, name: str, heads: Heads, layer: Layer, tokens: Float[Tensor, "batch n d"], call: Call) -> None:
        """Add the tokens that entered a module in a forward, and their call."""
        fits = tokens.shape[-1] == layer.weights.query.shape[-1]
        if not (fits and layer.on_data and layer.axial is None and layer.position not in VECTORS):
            return
        new = ScoreVariance(PositionMeans(FOLDS), layer.rope, partial(heads.pair_bias, layer))
        sums, pairs = self._sums.setdefault(name, new), scored_pairs(layer, tokens.float(), call)
        size, known = len(pairs.query), int(sums.means.sequences.sum())
        of_means, of_parts = slice(size), slice(0)
        if known >= SEQUENCES // 2:
            of_means, of_parts = of_parts, of_means
        elif not known and size >= SEQUENCES:
            of_means, of_parts = slice(0, None, 2), slice(1, None, 2)
        sides = pairs.positions.expand(size, -1), pairs.visible.expand(size, -1, -1, -1)
        whole = (pairs.query, pairs.key, sides[0], sides[0], sides[1], pairs.real, pairs.real_key)
        averaged, shown = (ScoredPairs(*(side[rows] for side in whole)) for rows in (of_means, of_parts))
        if len(averaged.query):
            fold = (torch.arange(len(averaged.query)) + known) % FOLDS
            sums.means.add(averaged.query, averaged.key, averaged.positions, averaged.real, fold)
        counted = len(sums.products)
        sums.add(shown, list(range(counted, counted + len(shown.query))))

    def result(self) -> dict[str, dict[str, Tensor]]:
        """By module and part, one value per head."""
        shares: dict[str, dict[str, Tensor]] = {}
        for name, sums in self._sums.items():
            if len(sums.products) >= SEQUENCES // 2:
                products = torch.stack(list(sums.products.values()))[:, 0]
                squares, total = products.diagonal(dim1=-2, dim2=-1), products.sum((-2, -1))
                shares[name] = {
                    part: jackknife(squares, total, itemgetter((..., PARTS.index(part)))).value for part in SHARES
                }
        return shares
