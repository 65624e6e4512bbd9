"""Causal Primal-Attention: a prefix state Σ_{j ≤ i} xⱼ[We, Wr][j mod n]ᵀ, scanned in chunks, in linear time.

The theory of KSVD covers the non-causal form only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


class Prefix(NamedTuple):
    """State of causal decoding: Σ xⱼ[We, Wr][j mod n]ᵀ per head, and the number of tokens so far."""

    total: Float[Tensor, "2 batch heads p s"]  # sums over the tokens so far
    seen: Int[Tensor, " batch"]  # tokens so far, per sequence


def prefix_scores(
    phi: Float[Tensor, "2 batch heads n p"],
    keys: Float[Tensor, "batch heads n p"],
    directions: Float[Tensor, "2 heads rows s"],
    real: Bool[Tensor, "batch n"] | None,
    before: Prefix,
) -> tuple[Float[Tensor, "2 batch heads n s"], Prefix]:
    """eᵢ = Σ_{j ≤ i} ⟨φ(qᵢ), xⱼ⟩ We[j mod rows]/√(tokens up to i), rᵢ likewise, and the state after the last token.

    j counts real tokens; padding must be 0.
    """
    n = phi.shape[-2]
    if real is None:
        count = torch.arange(1, n + 1, device=phi.device) + before.seen.unsqueeze(1)
    else:
        count = real.cumsum(1) + before.seen.unsqueeze(1)
    row = (count - 1).clamp(min=0) % directions.shape[2]  # (batch, n)
    values = directions[:, :, row].transpose(1, 2)
    scores, total = scan(phi, keys, values, before.total)
    scores = scores * count.clamp(min=1).to(scores.dtype).rsqrt()[:, None, :, None]
    return scores, Prefix(total, count[:, -1])


def scan(
    phi: Float[Tensor, "2 batch heads n p"],
    keys: Float[Tensor, "batch heads n p"],
    values: Float[Tensor, "2 batch heads n s"],
    before: Float[Tensor, "2 batch heads p s"],
) -> tuple[Float[Tensor, "2 batch heads n s"], Float[Tensor, "2 batch heads p s"]]:
    """Σ_{j ≤ i} ⟨φᵢ, xⱼ⟩ valuesⱼ for queries and keys, and the state Σ xⱼvaluesⱼᵀ after the last token."""
    n = phi.shape[-2]
    size = min(CHUNK, n)
    short = -n % size
    phi, keys, values = (pad(t, (0, 0, 0, short)).unflatten(-2, (-1, size)) for t in (phi, keys, values))
    states = torch.cat((before.unsqueeze(-3), keys.mT @ values), -3).cumsum(-3)  # before each chunk, after the last
    scores = (phi @ keys.mT).tril() @ values + phi @ states[..., :-1, :, :]
    return scores.flatten(-3, -2)[..., :n, :], states[..., -1, :, :]
