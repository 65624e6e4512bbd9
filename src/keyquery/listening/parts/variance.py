"""Variance of a head's scores by part, over the query-key pairs that the model scores.

The mean of each query over its visible keys is subtracted first: softmax is invariant to it. The means that separate
position from content come from other sequences (`PositionMeans`, four folds 0 to 3), and every part is computed
twice, with

    the mean query of fold 0 and the mean key of fold 1,      the mean query of fold 2 and the mean key of fold 3.

In cross-attention queries and keys have means of their own, each by position in its sequence; pairwise has no
symmetric and skew part. The four folds are independent, so that the product of the two versions is an unbiased estimate
of the part's square, however few sequences the means are of. The folds exchange roles from sequence to sequence, in all
twelve ways, so that the remaining noise averages out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from keyquery.checkpoints.positions.relative import Relative
from keyquery.forms.parts import PARTS, Rotated
from keyquery.forms.rope import Rope
from keyquery.listening.parts.means import PositionMeans
from keyquery.listening.parts.pairs import ScoredPairs

CELLS = {"cpu": 2**18}  # scores of one part in memory at a time: fits the cache
MANY_CELLS = 2**26  # the same of a GPU, where few large kernels are faster
FOLDS = 4  # of the sequences used for means
# Folds of (mean query, mean key, mean query, mean key); the two versions of a part are interchangeable.
ROLES = [order for order in permutations(range(FOLDS)) if order[0] < order[2]]
GROUPS = 8  # groups of sequences, for the jackknife of ranks
# From pairs and swapped pairs to symmetric and skew.
SPLIT = torch.eye(len(PARTS), dtype=torch.float64)
SPLIT[:2, :2] = torch.tensor([[0.5, 0.5], [0.5, -0.5]])
POPULARITY, QUERY_ONLY, POSITION = (PARTS.index(part) for part in ("popularity", "query_only", "position"))
Positions = Int[Tensor, " n"]
Bias = Callable[[Positions, Positions], Float[Tensor, "heads n n"] | None]
Terms = Callable[[Positions, Positions], list[Relative]]
Both = Sequence[Tensor]  # positions of queries, and of keys
Means = list[tuple[Float[Tensor, "heads n r"], Float[Tensor, "heads n r"]]]


class ScoreVariance:
    """Second moments of the score parts of every head, per sequence.

    `means` has four folds, or one: then parts are separated by the mean over all positions, with its noise. `bias` and
    `terms` give what positions add to the scaled scores: biases, and vectors that meet queries or keys. In
    cross-attention keys are of another sequence, with `key_means` of its own. Contents of two spaces cannot be swapped:
    their pairwise part is kept as symmetric, and skew is 0.
    """

    def __init__(
        self,
        means: PositionMeans,
        rope: Rope | None = None,
        bias: Bias | None = None,
        terms: Terms | None = None,
        key_means: PositionMeans | None = None,
    ) -> None:
        self.means, self.is_cross = means, key_means is not None
        self._sides = (means, means if key_means is None else key_means)
        self._rope, self._bias, self._terms = rope, bias, terms
        self.by_position = means.folds == FOLDS
        # By sequence: products of parts (2, heads, parts, parts) of whole and half window; squares due to the first
        # key (heads,); influence of the sequence on popularity and query-only through the means (2, heads).
        self.products: dict[int, Tensor] = {}
        self.sinks: dict[int, Tensor] = {}
        self.moves: dict[int, Tensor] = {}
        # Derivatives of popularity's and query-only's squares by mean queries and mean keys, summed over sequences.
        self._slopes: list[Float[Tensor, "positions heads r"]] = []
        self._followed = 0
        self.contents: Float64[Tensor, "groups heads two_r two_r"] | None = None
        self.tokens = torch.zeros(GROUPS, dtype=torch.float64)
        self.pairs = self.left_out = 0  # visible pairs counted, and excluded for positions that too few sequences reach
        self.longest = 0  # tokens of the longest sequence

    def add(self, pairs: ScoredPairs, sequences: list[int]) -> None:
        """Add sequences by number; a repeated one (a block shared by several layers) adds to its sums."""
        for row, sequence in enumerate(sequences):
            earlier = [slopes / self._followed for slopes in self._slopes]
            positions = [side[row % len(side)] for side in (pairs.positions, pairs.key_positions)]
            visible = pairs.visible[row % len(pairs.visible)]
            real = [visible.any(0).any(-1), visible.any(0).any(0)]
            if not self.is_cross:
                real = [real[0] | real[1]] * 2
            self.longest = max(self.longest, int(real[0].sum()))
            if self.by_position:
                reached = [means.reaches(side) for means, side in zip(self._sides, positions, strict=True)]
                real = [tokens & known for tokens, known in zip(real, reached, strict=True)]
            count = int(visible.sum())
            visible = visible[:, real[0]][:, :, real[1]]
            self.pairs += int(visible.sum()) // len(visible)
            self.left_out += (count - int(visible.sum())) // len(visible)
            if bool(real[0].any()) and int(real[1].sum()) > 1:
                query, key = (x[row][:, tokens] for x, tokens in zip((pairs.query, pairs.key), real, strict=True))
                kept = [of_side[tokens] for of_side, tokens in zip(positions, real, strict=True)]
                self._add(query, key, kept, visible, sequence, earlier)

    def _add(
        self, query: Tensor, key: Tensor, positions: Both, visible: Tensor, sequence: int, earlier: Sequence[Tensor]
    ) -> None:
        """Add one sequence, some heads at a time."""
        heads, n, m = len(query), query.shape[1], key.shape[1]
        means = self._means_at(positions, query, key, ROLES[sequence % len(ROLES)])
        products, sinks, moves = [], [], []
        if self.by_position:  # slopes for positions up to the last ones
            before = self._slopes or [query.new_zeros(0, heads, query.shape[2])] * 2
            more = [max(int(side.max()) + 1 - len(slopes), 0) for side, slopes in zip(positions, before, strict=True)]
            self._slopes = [pad(slopes, (0, 0, 0, 0, 0, count)) for slopes, count in zip(before, more, strict=True)]
        at_once = max(CELLS.get(query.device.type, MANY_CELLS) // (n * m), 1)
        for start in range(0, heads, at_once):
            chosen = slice(start, min(start + at_once, heads))
            seen = visible if len(visible) == 1 else visible[chosen]
            (first, vectors), *others = [
                self._parts(query[chosen], key[chosen], mean_query[chosen], mean_key[chosen], positions, chosen)
                for mean_query, mean_key in (means if self.by_position else means[:1])
            ]
            second = others[0][0] if others else first.clone()
            products.append(products_of(first, second, seen))  # first and second are centred in place
            sinks.append(sink_of(first[:, POSITION], second[:, POSITION], positions[1], seen))
            if self.by_position:
                moves.append(self._follow(first, vectors, positions, chosen, earlier))
        sums = [(self.products, torch.cat(products, 1)), (self.sinks, torch.cat(sinks))]
        for by_sequence, value in [*sums, (self.moves, torch.cat(moves, 1))] if earlier else sums:
            by_sequence[sequence] = by_sequence[sequence] + value if sequence in by_sequence else value
        self._followed += 1
        self.tokens[sequence % GROUPS] += n
        if not self.is_cross:
            self._add_contents(query, key, means, sequence % GROUPS)

    def _means_at(self, positions: Both, query: Tensor, key: Tensor, folds: tuple[int, ...]) -> Means:
        """Mean queries and keys at each token, for the two versions of a part."""

        def mean(side: int, like: Tensor, fold: int) -> Tensor:
            if not self.by_position:
                return self._sides[side].everywhere()[side][:, None].to(like).expand_as(like)
            return self._sides[side].at(positions[side][None], fold)[side][0].to(like)

        return [(mean(0, query, i), mean(1, key, j)) for i, j in (folds[:2], folds[2:])]

    def _parts(
        self, query: Tensor, key: Tensor, mean_query: Tensor, mean_key: Tensor, positions: Both, chosen: slice
    ) -> tuple[Float[Tensor, "heads parts n m"], Rotated]:
        """Pairs, swapped pairs, popularity, query-only and position; in cross-attention nothing can be swapped."""
        of_side, rope = positions[0], self._rope
        if self.is_cross:
            sides = [torch.stack((x - mean, mean)) for x, mean in ((query, mean_query), (key, mean_key))]
            if rope is not None:
                sides = [rope.rotate(side, of_side) for side, of_side in zip(sides, positions, strict=True)]
            (query, mean_query), (key, mean_key) = sides
            vectors = Rotated(query, key, mean_query, mean_key, query, key)
        else:
            vectors = Rotated.of(query, key, mean_query, mean_key, of_side, rope)
        out = query.new_empty(len(query), len(PARTS), query.shape[1], key.shape[1])
        out[:, 0] = vectors.query @ vectors.key.mT
        out[:, 1] = out[:, 0] if self.is_cross else out[:, 0].mT if rope is None else vectors.swapped()
        out[:, POPULARITY] = vectors.query_mean @ vectors.key.mT
        out[:, QUERY_ONLY] = vectors.query @ vectors.key_mean.mT
        out[:, POSITION] = vectors.query_mean @ vectors.key_mean.mT
        bias = None if self._bias is None else self._bias(of_side, of_side)
        if bias is not None:
            out[:, POSITION] += bias[chosen].to(out)
        parts = dict(zip(PARTS, out.unbind(1), strict=True))  # views
        for term in [] if self._terms is None else self._terms(of_side, of_side):
            add_term(parts, term.of_heads(chosen), query, key, mean_query, mean_key)
        return out, vectors

    def _follow(
        self, parts: Tensor, vectors: Rotated, positions: Both, chosen: slice, earlier: Sequence[Tensor]
    ) -> Float64[Tensor, "2 heads"]:
        """Accumulate the derivatives of popularity by the mean query and of query-only by the mean key.

        Returns the influence of this sequence on the two if it were used for the means: 2·q′·slope, with the mean slope
        of the sequences before it.
        """
        moves = []
        slopes = (parts[:, POPULARITY] @ vectors.key, parts[:, QUERY_ONLY].mT @ vectors.query)
        for side, content in enumerate((vectors.query, vectors.key)):
            of_side, means = positions[side], self._sides[side]
            self._slopes[side][of_side, chosen] += slopes[side].transpose(0, 1)
            if earlier:
                inside = of_side < len(earlier[side])
                # At positions that few sequences reach, each has more influence on the mean.
                weight = (means.sequences.sum() / means.counts.sum(0)[of_side[inside]])[:, None]
                slope = earlier[side][of_side[inside]][:, chosen].transpose(0, 1) * weight.to(content)
                moves.append(2 * (content[:, inside] * slope).sum((-2, -1)).double())
        return torch.stack(moves) if moves else torch.zeros(2, len(parts), dtype=torch.float64, device=parts.device)

    def _add_contents(self, query: Tensor, key: Tensor, means: Means, group: int) -> None:
        """Second moments of the contents [q′; k′], for the ranks of symmetric and skew part."""
        (query_0, key_1), (query_1, key_0) = means
        content = torch.cat((query - (query_0 + query_1) / 2, key - (key_0 + key_1) / 2), -1)
        moment = (content.mT @ content).double()
        if self.contents is None:
            self.contents = moment.new_zeros(GROUPS, *moment.shape)
        self.contents[group] += moment


def add_term(
    parts: dict[str, Tensor], term: Relative, query: Tensor, key: Tensor, mean_query: Tensor, mean_key: Tensor
) -> None:
    """Add what vectors of positions give to the parts, in place: with a content, or with a mean."""
    if term.side == "query":
        parts["query_only"] += term.scores(query - mean_query, constant=False)
        parts["position"] += term.scores(mean_query)
    else:
        parts["popularity"] += term.scores(key - mean_key)
        parts["position"] += term.scores(mean_key)


def products_of(first: Tensor, second: Tensor, seen: Bool[Tensor, "any n m"]) -> Float64[Tensor, "2 heads p p"]:
    """Products of the parts, centred per query, over visible pairs, and over those within the half window."""
    half = first.shape[-1] // 2
    shorter = [part[..., :half, :half].clone() for part in (first, second)]
    out = []
    for parts, pairs in (([first, second], seen), (shorter, seen[:, :half, :half])):
        weight = pairs[:, None].to(first)
        count = weight.sum(-1, keepdim=True).clamp(min=1)
        for part in parts:
            part.mul_(weight)
            part.addcmul_(weight, part.sum(-1, keepdim=True) / count, value=-1)
        product = (parts[0].flatten(2) @ parts[1].flatten(2).mT).double()
        split = SPLIT.to(product.device)
        out.append(split @ product @ split.mT)
    return torch.stack(out)


def sink_of(
    first: Float[Tensor, "heads n m"], second: Float[Tensor, "heads n m"], keys: Tensor, seen: Bool[Tensor, "any n m"]
) -> Float64[Tensor, " heads"]:
    """The share of the position part's square due to the first key, against all others of the same query."""
    start = seen & (keys == keys.min())
    among, count = start.sum(-1), seen.sum(-1)
    others = (count - among).clamp(min=1)
    first_sum, second_sum = ((part * start).sum(-1) for part in (first, second))
    # Rows sum to 0: m₁ keys with mean a leave the others −m₁a/(m − m₁), squares m₁a²·m/(m − m₁) in all.
    squares = first_sum * second_sum / among.clamp(min=1) * count / others * (count > among)
    return squares.sum(-1).double()
