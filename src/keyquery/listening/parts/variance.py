"""Variance of a head's scores by part, over the query-key pairs that the model scores.

The mean of each query over its visible keys is subtracted first: softmax is invariant to it. The means that separate
position from content come from other sequences (`PositionMeans`, four folds 0 to 3), and every part is computed
twice, with

    the mean query of fold 0 and the mean key of fold 1,      the mean query of fold 2 and the mean key of fold 3.

These four are independent, so that the product of the two versions is an unbiased estimate of the part's square,
however few sequences the means are of. The folds exchange roles from sequence to sequence, in all twelve ways, so that
the remaining noise averages out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from keyquery.checkpoints.positions.relative import Relative
from keyquery.forms.parts import PARTS, Rotated
from keyquery.forms.rope import Rope
from keyquery.listening.parts.means import PositionMeans

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
Means = list[tuple[Float[Tensor, "heads n r"], Float[Tensor, "heads n r"]]]


class ScoreVariance:
    """Second moments of the score parts of every head, per sequence.

    `means` has four folds, or one: then parts are separated by the mean over all positions, with its noise. `bias` and
    `terms` give what positions add to the scaled scores: biases, and vectors that meet queries or keys.
    """

    def __init__(
        self, means: PositionMeans, rope: Rope | None = None, bias: Bias | None = None, terms: Terms | None = None
    ) -> None:
        self.means = means
        self._rope = rope
        self._bias, self._terms = bias, terms
        self.by_position = means.folds == FOLDS
        # By sequence: products of parts (2, heads, parts, parts) of whole and half window; squares due to the first
        # key (heads,); influence of the sequence on popularity and query-only through the means (2, heads).
        self.products: dict[int, Tensor] = {}
        self.sinks: dict[int, Tensor] = {}
        self.moves: dict[int, Tensor] = {}
        # Derivatives of popularity's and query-only's squares by the means, summed over sequences.
        self._slopes: Float[Tensor, "positions two heads r"] | None = None
        self._followed = 0
        self.contents: Float64[Tensor, "groups heads two_r two_r"] | None = None
        self.tokens = torch.zeros(GROUPS, dtype=torch.float64)
        self.pairs = self.left_out = 0  # visible pairs counted, and excluded for positions that too few sequences reach
        self.longest = 0  # tokens of the longest sequence

    def add(
        self,
        query: Float[Tensor, "batch heads n r"],
        key: Float[Tensor, "batch heads n r"],
        positions: Int[Tensor, "#batch n"],
        visible: Bool[Tensor, "#batch any n n"],
        sequences: list[int],
    ) -> None:
        """Add sequences by number; queries are scaled, and queries and keys are before RoPE.

        A repeated number (a block shared by several layers) adds to its sums.
        """
        for row, sequence in enumerate(sequences):
            slopes = None if self._slopes is None else self._slopes / self._followed
            at, seen = positions[row % len(positions)], visible[row % len(visible)]
            real = seen.any(0).any(0) | seen.any(0).any(-1)
            self.longest = max(self.longest, int(real.sum()))
            kept = real & self._known(at) if self.by_position else real
            count, seen = int(seen.sum()), seen[:, kept][:, :, kept]
            self.pairs += int(seen.sum()) // len(seen)
            self.left_out += (count - int(seen.sum())) // len(seen)
            if int(kept.sum()) > 1:
                self._add(query[row][:, kept], key[row][:, kept], at[kept], seen, sequence, slopes)

    def _known(self, at: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        known = self.means.known
        return (at < len(known)) & known[at.clamp(max=len(known) - 1)]

    def _add(self, query: Tensor, key: Tensor, at: Tensor, seen: Tensor, sequence: int, slopes: Tensor | None) -> None:
        """Add one sequence, some heads at a time."""
        heads, n, rank = query.shape
        means = self._means_at(at, query, ROLES[sequence % len(ROLES)])
        products = []
        sinks = []
        moves = []
        if self.by_position:
            self._reserve(int(at.max()) + 1, heads, rank, query)
        for numbers in torch.arange(heads).split(at_once(n * n, query)):
            chosen = slice(int(numbers[0]), int(numbers[-1]) + 1)
            own = seen if len(seen) == 1 else seen[chosen]
            versions = [
                self._parts(query[chosen], key[chosen], mean_query[chosen], mean_key[chosen], at, chosen)
                for mean_query, mean_key in (means if self.by_position else means[:1])
            ]
            (first, vectors), second = versions[0], versions[1][0] if self.by_position else versions[0][0].clone()
            products.append(products_of(first, second, own))  # first and second are centred in place
            sinks.append(sink_of(first[:, POSITION], second[:, POSITION], at, own))
            if self.by_position:
                moves.append(self._follow(first, vectors, at, chosen, slopes))
        increase(self.products, sequence, torch.cat(products, 1))
        increase(self.sinks, sequence, torch.cat(sinks))
        if slopes is not None:
            increase(self.moves, sequence, torch.cat(moves, 1))
        self._followed += 1
        self._add_contents(query, key, means, sequence % GROUPS)

    def _means_at(self, at: Int[Tensor, " n"], like: Tensor, folds: tuple[int, ...]) -> Means:
        """Mean queries and keys at each token, for the two versions of a part."""
        if not self.by_position:
            query, key = (mean[:, None].to(like).expand(-1, len(at), -1) for mean in self.means.everywhere())
            return [(query, key)] * 2
        queries, keys = zip(*(self.means.at(at[None], fold) for fold in range(FOLDS)), strict=True)
        return [(queries[i][0].to(like), keys[j][0].to(like)) for i, j in (folds[:2], folds[2:])]

    def _parts(
        self, query: Tensor, key: Tensor, mean_query: Tensor, mean_key: Tensor, at: Tensor, chosen: slice
    ) -> tuple[Float[Tensor, "heads parts n n"], Rotated]:
        """Pairs, swapped pairs, popularity, query-only and position."""
        out, vectors = stacked_parts(query, key, mean_query, mean_key, at, self._rope)
        bias = None if self._bias is None else self._bias(at, at)
        if bias is not None:
            out[:, POSITION] += bias[chosen].to(out)
        parts = dict(zip(PARTS, out.unbind(1), strict=True))  # views
        for term in [] if self._terms is None else self._terms(at, at):
            add_term(parts, term.of_heads(chosen), query, key, mean_query, mean_key)
        return out, vectors

    def _reserve(self, length: int, heads: int, rank: int, like: Tensor) -> None:
        """Allocate slopes for positions up to `length`."""
        had = 0 if self._slopes is None else len(self._slopes)
        if had < length:
            longer = like.new_zeros(length, 2, heads, rank)
            if self._slopes is not None:
                longer[:had] = self._slopes
            self._slopes = longer

    def _follow(
        self, parts: Tensor, vectors: Rotated, at: Tensor, chosen: slice, slopes: Tensor | None
    ) -> Float64[Tensor, "2 heads"]:
        """Accumulate the derivatives of popularity by the mean query and of query-only by the mean key.

        Returns the influence of this sequence on the two if it were used for the means: 2·q′·slope, with the mean slope
        of the sequences before it.
        """
        assert self._slopes is not None
        self._slopes[at, 0, chosen] += (parts[:, POPULARITY] @ vectors.key).transpose(0, 1)
        self._slopes[at, 1, chosen] += (parts[:, QUERY_ONLY].mT @ vectors.query).transpose(0, 1)
        if slopes is None:
            return torch.zeros(2, len(parts), dtype=torch.float64, device=parts.device)
        inside = at < len(slopes)
        # At positions that few sequences reach, each has more influence on the mean.
        weight = self.means.sequences.sum() / self.means.counts.sum(0)[at[inside]]
        own = slopes[at[inside]][:, :, chosen].permute(1, 2, 0, 3) * weight[:, None].to(slopes)
        contents = torch.stack((vectors.query, vectors.key))[:, :, inside]
        return 2 * (contents * own).sum((-2, -1)).double()

    def _add_contents(self, query: Tensor, key: Tensor, means: Means, group: int) -> None:
        """Second moments of the contents [q′; k′], for the ranks of symmetric and skew part."""
        (query_0, key_1), (query_1, key_0) = means
        content = torch.cat((query - (query_0 + query_1) / 2, key - (key_0 + key_1) / 2), -1)
        moment = (content.mT @ content).double()
        if self.contents is None:
            self.contents = moment.new_zeros(GROUPS, *moment.shape)
        self.contents[group] += moment
        self.tokens[group] += query.shape[1]


def stacked_parts(
    query: Tensor, key: Tensor, mean_query: Tensor, mean_key: Tensor, at: Tensor, rope: Rope | None
) -> tuple[Float[Tensor, "heads parts n n"], Rotated]:
    """The same without what positions add to scores."""
    vectors = Rotated.of(query, key, mean_query, mean_key, at, rope)
    heads, n = query.shape[:2]
    out = query.new_empty(heads, len(PARTS), n, n)
    out[:, 0] = vectors.query @ vectors.key.mT
    out[:, 1] = out[:, 0].mT if rope is None else vectors.swapped()
    out[:, POPULARITY] = vectors.query_mean @ vectors.key.mT
    out[:, QUERY_ONLY] = vectors.query @ vectors.key_mean.mT
    out[:, POSITION] = vectors.query_mean @ vectors.key_mean.mT
    return out, vectors


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
    first: Float[Tensor, "heads n m"], second: Float[Tensor, "heads n m"], at: Tensor, seen: Bool[Tensor, "any n m"]
) -> Float64[Tensor, " heads"]:
    """The share of the position part's square due to the first key, against all others of the same query."""
    start = seen & (at == at.min())
    among, count = start.sum(-1), seen.sum(-1)
    others = (count - among).clamp(min=1)
    first_sum, second_sum = ((part * start).sum(-1) for part in (first, second))
    # Rows sum to 0: m₁ keys with mean a leave the others −m₁a/(m − m₁), squares m₁a²·m/(m − m₁) in all.
    squares = first_sum * second_sum / among.clamp(min=1) * count / others * (count > among)
    return squares.sum(-1).double()


def at_once(cells: int, like: Tensor) -> int:
    """How many heads are computed at a time, with so many scores each."""
    return max(CELLS.get(like.device.type, MANY_CELLS) // max(cells, 1), 1)


def increase(sums: dict[int, Tensor], sequence: int, value: Tensor) -> None:
    """Add to the sum of a sequence."""
    sums[sequence] = sums[sequence] + value if sequence in sums else value
