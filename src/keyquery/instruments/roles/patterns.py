"""Attention patterns of roles: the keys that a role attends to, and how much attention these get.

Every score is linear in the attention map, ⟨W, A⟩: W spreads weight 1 evenly over the queries that have such a key,
and for each of them over its keys. So a score is the mean attention of a query to the keys of the role, its value
under uniform attention is ⟨W, U⟩, and a map can be dropped as soon as the products are taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# From the most specific to the most general: a head is called by the first that it has.
ROLES = ("induction", "duplicate_token", "retrieval", "previous_token", "next_token", "alignment", "local", "sink")
POSITIONAL = ("previous_token", "next_token", "local", "sink")  # defined by positions; the others by content
PERMUTATIONS = 99  # random orders of the queries, for the null level of alignment
LEVEL = 0.95


class Scores(NamedTuple):
    """Scores of one role, (sequences,) or (sequences, heads), and their null levels; NaN where no query counts."""

    score: Tensor
    null: Tensor


def keys_of(
    role: str, n: int, ids: Int[Tensor, "batch n"] | None, window: int, ends: Int[Tensor, "batch 2"]
) -> Bool[Tensor, "#batch n n"]:
    """The keys of a role per query, visible or not; those of a sink are at `ends`, the first and last token or −1."""
    positions = torch.arange(n, device=ends.device)
    offset = positions - positions[:, None]
    if role == "sink":
        return (positions[None, None] == ends[..., None]).any(1, keepdim=True).expand(-1, n, -1)
    if role in POSITIONAL:
        near = {"previous_token": offset == -1, "next_token": offset == 1, "local": offset.abs() < window}
        return near[role][None]
    assert ids is not None, "roles by content need token ids"
    same = (ids[:, :, None] == ids[:, None]) & (offset != 0)  # duplicate_token
    if role == "induction":  # the key after a token with the query's id
        same = torch.cat((torch.zeros_like(same[..., :1]), same[..., :-1]), -1) & (offset != 0)
    return same


def weights(
    keys: Bool[Tensor, "batch n m"], seen: Bool[Tensor, "batch n m"]
) -> tuple[Float[Tensor, "batch n m"], Float[Tensor, "batch n m"]]:
    """Weights W of a score, and of its null level by permutation: the keys of other queries in place of a query's.

    Queries count that see a key of the role and another key besides. Both are NaN for sequences without such queries.
    """
    of_role = keys & seen
    counts = of_role.sum(-1, keepdim=True)
    counted = (counts > 0) & (counts < seen.sum(-1, keepdim=True))
    total = counted.sum((-1, -2), keepdim=True)
    share = torch.where(total > 0, counted / total, torch.nan)
    others = of_role.any(-2, keepdim=True) & seen & ~of_role
    return share * of_role, share * others * counts / others.sum(-1, keepdim=True).clamp(min=1)


class Patterns:
    """The weights of several roles for the visible pairs of a batch, to be applied to the maps of each head."""

    def __init__(self, keys: dict[str, Bool[Tensor, "#batch n m"]], seen: Bool[Tensor, "batch n m"]) -> None:
        self._weights = {role: weights(of_role.expand_as(seen), seen) for role, of_role in keys.items()}
        self._even = seen / seen.sum(-1, keepdim=True).clamp(min=1)  # uniform attention

    def of(self, maps: Float[Tensor, "batch heads n m"]) -> dict[str, Scores]:
        """Scores of every role for the maps of some heads; null levels are those of `Roles.units`."""
        scores = {}
        for role, (weighted, others) in self._weights.items():
            score, permuted = (torch.einsum("bij,bhij->bh", w, maps.float()) for w in (weighted, others))
            null = torch.einsum("bij,bij->b", weighted, self._even)[:, None].expand_as(score)
            null = null if role in POSITIONAL else torch.maximum(null, permuted)
            scores[role] = Scores(score.cpu().double(), null.cpu().double())
        return scores


def alignment(
    maps: Float[Tensor, "batch heads n m"], queries: Bool[Tensor, "batch n"], generator: torch.Generator
) -> Scores:
    """Do later queries attend to later keys? P(j < j′) − P(j > j′) of keys drawn from attention, over all i < i′."""
    batch, heads = maps.shape[:2]
    score, null = torch.full((2, batch, heads), torch.nan, dtype=torch.float64)
    for row in range(batch):
        attention = maps[row, :, queries[row]].cpu().double()
        n = attention.shape[1]
        if n < 2:
            continue
        before = attention.cumsum(-1) - attention  # P(key of i′ < j)
        behind = before @ attention.mT  # [i′, i]: P(j′ < j)
        forward = behind.mT - behind  # [i′, i]: P(j < j′) − P(j > j′), antisymmetric
        later = torch.ones(n, n, dtype=torch.float64).tril(-1)
        pairs = n * (n - 1) / 2
        score[row] = (forward * later).sum((-1, -2)) / pairs
        ranks = torch.rand(PERMUTATIONS, n, generator=generator).argsort(-1).double()
        signs = (ranks[:, :, None] - ranks[:, None]).sign()  # 1 where i′ comes after i in the random order
        shuffled = torch.einsum("hij,pij->hp", forward, signs) / (2 * pairs)
        null[row] = shuffled.sort(-1).values[:, int(LEVEL * (PERMUTATIONS + 1)) - 1]
    return Scores(score, null)
