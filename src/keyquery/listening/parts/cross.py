"""Variance of the scores of cross-attention by part: queries and keys come from two sequences, each with its means.

With the mean query q̄ᵢ at each position of the one sequence, the mean key k̄ⱼ at each position of the other, and contents
q′ and k′, the score is exactly

    position  q̄ᵢ·k̄ⱼ + bias      popularity  q̄ᵢ·k′ⱼ      query_only  q′ᵢ·k̄ⱼ      pairwise  q′ᵢ·k′ⱼ

Pairwise has no symmetric and skew part: contents of two different spaces cannot be swapped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from keyquery.forms.parts import PARTS
from keyquery.forms.rope import Rope
from keyquery.listening.parts.means import PositionMeans
from keyquery.listening.parts.pairs import CrossPairs
from keyquery.listening.parts.variance import (
    GROUPS,
    POPULARITY,
    POSITION,
    QUERY_ONLY,
    ROLES,
    ScoreVariance,
    at_once,
    increase,
    products_of,
    sink_of,
)


class CrossMeans:
    """Mean queries and mean keys by position, each over its own sequence."""

    def __init__(self, folds: int) -> None:
        self.query, self.key = PositionMeans(folds), PositionMeans(folds)

    def add(self, pairs: CrossPairs, fold: Int[Tensor, " batch"]) -> None:
        """Add a batch of sequences."""
        for own, x, real in (
            (self.query, pairs.query, pairs.real_query),
            (self.key, pairs.key, pairs.real_key),
        ):
            at = torch.arange(x.shape[-2], device=x.device).expand(len(x), -1)
            own.add(x, x, at, real, fold)


class CrossVariance(ScoreVariance):
    """Second moments of the score parts of every cross-attention head; pairwise is kept as "symmetric", skew is 0."""

    def __init__(self, means: CrossMeans, rope: Rope | None = None) -> None:
        super().__init__(means.query, rope)
        self._key_means = means.key
        self._slopes_of: dict[int, Tensor] = {}  # of popularity by the mean query, of query-only by the mean key

    def add_pairs(self, pairs: CrossPairs, sequences: list[int]) -> None:
        """Add sequences by number."""
        for row, sequence in enumerate(sequences):
            earlier = {side: slopes / self._followed for side, slopes in self._slopes_of.items()}
            real_query, real_key = pairs.real_query[row], pairs.real_key[row]
            rows, columns = (torch.arange(len(real), device=real.device) for real in (real_query, real_key))
            kept_query, kept_key = real_query, real_key
            self.longest = max(self.longest, int(real_query.sum()))
            if self.by_position:
                kept_query, kept_key = (
                    real_query & _known(self.means, rows),
                    real_key & _known(self._key_means, columns),
                )
            self.pairs += int(kept_query.sum()) * int(kept_key.sum())
            self.left_out += int(real_query.sum()) * int(real_key.sum()) - int(kept_query.sum()) * int(kept_key.sum())
            if kept_query.any() and int(kept_key.sum()) > 1:
                query, key = pairs.query[row][:, kept_query], pairs.key[row][:, kept_key]
                self._add_cross(query, key, (rows[kept_query], columns[kept_key]), sequence, earlier)

    def _add_cross(
        self, query: Tensor, key: Tensor, at: tuple[Tensor, Tensor], sequence: int, earlier: Mapping[int, Tensor]
    ) -> None:
        heads, n, m = len(query), query.shape[1], key.shape[1]
        folds = ROLES[sequence % len(ROLES)]
        products, sinks, moves = [], [], []
        seen = torch.ones(1, n, m, dtype=torch.bool, device=query.device)
        for numbers in torch.arange(heads).split(at_once(n * m, query)):
            chosen = slice(int(numbers[0]), int(numbers[-1]) + 1)
            versions = [
                self._cross_parts(query[chosen], key[chosen], at, chosen, pair) for pair in (folds[:2], folds[2:])
            ]
            (first, contents), (second, _) = versions
            products.append(products_of(first, second, seen))
            sinks.append(sink_of(first[:, POSITION], second[:, POSITION], at[1], seen))
            if self.by_position:
                moves.append(self._follow_cross(first, contents, at, chosen, heads, earlier))
        increase(self.products, sequence, torch.cat(products, 1))
        increase(self.sinks, sequence, torch.cat(sinks))
        if earlier:
            increase(self.moves, sequence, torch.cat(moves, 1))
        self._followed += 1
        self.tokens[sequence % GROUPS] += n

    def _cross_parts(
        self, query: Tensor, key: Tensor, at: tuple[Tensor, Tensor], chosen: slice, folds: tuple[int, ...]
    ) -> tuple[Float[Tensor, "heads parts n m"], tuple[Tensor, Tensor]]:
        """The parts, with the pairwise one in the places of pairs and swapped pairs; and the contents."""
        sides = []
        for x, means, places, fold in zip((query, key), (self.means, self._key_means), at, folds, strict=True):
            if self.by_position:
                mean = means.at(places[None], fold)[0][0].to(x)[chosen]
            else:
                mean = means.everywhere()[0][chosen, None].to(x).expand_as(x)
            turned = (
                (x - mean, mean) if self._rope is None else (self._rope.rotate(t, places) for t in (x - mean, mean))
            )
            sides.append(tuple(turned))
        (own, mean_query), (other, mean_key) = sides
        out = query.new_empty(len(query), len(PARTS), query.shape[1], key.shape[1])
        out[:, 0] = out[:, 1] = own @ other.mT
        out[:, POPULARITY] = mean_query @ other.mT
        out[:, QUERY_ONLY] = own @ mean_key.mT
        out[:, POSITION] = mean_query @ mean_key.mT
        return out, (own, other)

    def _follow_cross(
        self,
        parts: Tensor,
        contents: tuple[Tensor, Tensor],
        at: tuple[Tensor, Tensor],
        chosen: slice,
        heads: int,
        earlier: Mapping[int, Tensor],
    ) -> Float64[Tensor, "2 heads"]:
        """As `ScoreVariance._follow`, with positions of their own for queries and keys."""
        moves = []
        slopes = (parts[:, POPULARITY] @ contents[1], parts[:, QUERY_ONLY].mT @ contents[0])
        for side, (slope, content, places) in enumerate(zip(slopes, contents, at, strict=True)):
            length = int(places.max()) + 1
            whole = self._slopes_of.get(side)
            if whole is None or len(whole) < length:
                longer = slope.new_zeros(length, heads, slope.shape[-1])
                if whole is not None:
                    longer[: len(whole)] = whole
                whole = self._slopes_of[side] = longer
            whole[places, chosen] += slope.transpose(0, 1)
            if side not in earlier:
                moves.append(torch.zeros(len(parts), dtype=torch.float64, device=parts.device))
                continue
            means = (self.means, self._key_means)[side]
            inside = places < len(earlier[side])
            weight = means.sequences.sum() / means.counts.sum(0)[places[inside]]
            own = earlier[side][places[inside]][:, chosen].transpose(0, 1) * weight[:, None].to(slope)
            moves.append(2 * (content[:, inside] * own).sum((-2, -1)).double())
        return torch.stack(moves)


def _known(means: PositionMeans, at: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    known = means.known.to(at.device)
    return (at < len(known)) & known[at.clamp(max=len(known) - 1)]
