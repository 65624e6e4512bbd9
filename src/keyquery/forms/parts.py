"""The parts of a head's scores: exact for every pair of tokens, whatever the means are.

A query at position i is q̄ᵢ + q′ᵢ: the mean query at that position, and the content of this one token; likewise a key.
With R the model's rotation (RoPE), if it has one, the scaled score of query i and key j is exactly the sum of

    position      q̄ᵢ R(j−i) k̄ⱼ + bias(j−i)                mean query with mean key
    popularity    q̄ᵢ R(j−i) k′ⱼ                           mean query with the content of a key
    query_only    q′ᵢ R(j−i) k̄ⱼ                           content of a query with the mean key
    symmetric     ½(q′ᵢ R(j−i) k′ⱼ + q′ⱼ R(j−i) k′ᵢ)      content with content, unchanged by swapping the contents
    skew          ½(q′ᵢ R(j−i) k′ⱼ − q′ⱼ R(j−i) k′ᵢ)      content with content, negated by swapping them

The swap exchanges the two contents and leaves the positions where they are: xᵀM(Δ)y becomes yᵀM(Δ)x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from keyquery.forms.rope import Rope

PARTS = ("symmetric", "skew", "popularity", "query_only", "position")


class Parts(NamedTuple):
    """The parts of the scaled scores, query by key; their sum is the score."""

    symmetric: Float[Tensor, "*batch n n"]
    skew: Float[Tensor, "*batch n n"]
    popularity: Float[Tensor, "*batch n n"]
    query_only: Float[Tensor, "*batch n n"]
    position: Float[Tensor, "*batch n n"]


class Rotated(NamedTuple):
    """Content and mean of queries and keys, rotated to their positions; `back_*` are rotated the other way."""

    query: Float[Tensor, "*batch n r"]
    key: Float[Tensor, "*batch n r"]
    query_mean: Float[Tensor, "*batch n r"]
    key_mean: Float[Tensor, "*batch n r"]
    back_query: Float[Tensor, "*batch n r"]
    back_key: Float[Tensor, "*batch n r"]

    @classmethod
    def of(
        cls,
        query: Float[Tensor, "*batch n r"],
        key: Float[Tensor, "*batch n r"],
        query_mean: Float[Tensor, "*#batch n r"],
        key_mean: Float[Tensor, "*#batch n r"],
        positions: Shaped[Tensor, "*#batch n"],
        rope: Rope | None,
    ) -> Rotated:
        """From unrotated queries and keys, and their means at each position."""
        contents = query - query_mean, key - key_mean
        means = query_mean.expand_as(query), key_mean.expand_as(key)
        if rope is None:
            return cls(*contents, *means, *contents)
        # As one each: on a GPU a kernel costs as much as its launch.
        forward = rope.rotate(torch.stack((*contents, *means)), positions)
        return cls(*forward.unbind(), *rope.back(torch.stack(contents), positions).unbind())

    def parts(self, bias: Float[Tensor, "*#batch n n"] | None = None) -> Parts:
        """The parts of the scores, with the bias of positions."""
        pairs, swapped = self.query @ self.key.mT, self.swapped()
        position = self.query_mean @ self.key_mean.mT
        return Parts(
            symmetric=(pairs + swapped) / 2,
            skew=(pairs - swapped) / 2,
            popularity=self.query_mean @ self.key.mT,
            query_only=self.query @ self.key_mean.mT,
            position=position if bias is None else position + bias,
        )

    def swapped(self) -> Float[Tensor, "*batch n n"]:
        """q′ⱼ R(j−i) k′ᵢ, which is k′ᵢ R(i−j) q′ⱼ: the roles swapped, and rotated the other way."""
        return self.back_key @ self.back_query.mT


def score_parts(
    query: Float[Tensor, "*batch n r"],
    key: Float[Tensor, "*batch n r"],
    query_mean: Float[Tensor, "*#batch n r"],
    key_mean: Float[Tensor, "*#batch n r"],
    positions: Shaped[Tensor, "*#batch n"] | None = None,
    rope: Rope | None = None,
    bias: Float[Tensor, "*#batch n n"] | None = None,
) -> Parts:
    """The parts of the scores q·k, from unrotated queries, scaled already, and keys, and their means per position."""
    positions = torch.arange(query.shape[-2], device=query.device) if positions is None else positions
    return Rotated.of(query, key, query_mean, key_mean, positions, rope).parts(bias)
