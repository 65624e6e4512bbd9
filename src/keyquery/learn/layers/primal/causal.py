"""Causal Primal-Attention: a prefix sum Σ_{j ≤ i} xⱼ[We, Wr][j mod n]ᵀ, scanned in chunks, in linear time.

The theory of KSVD covers the non-causal form only.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


def causal_scores(
    phi: Float[Tensor, "2 batch heads n p"],
    keys: Float[Tensor, "batch heads n p"],
    directions: Float[Tensor, "2 heads rows s"],
    real: Bool[Tensor, "batch n"] | None,
) -> tuple[Float[Tensor, "2 batch heads n s"], Int[Tensor, " batch"]]:
    """eᵢ = Σ_{j ≤ i} ⟨φ(qᵢ), xⱼ⟩ We[j mod rows]/√(tokens up to i), rᵢ likewise, and the number of tokens per sample.

    j counts real tokens; padding must be 0.
    """
    shown = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device) if real is None else real
    count = shown.cumsum(1)
    row = (count - 1).clamp(min=0) % directions.shape[2]  # (batch, n)
    scores = scan(phi, keys, directions[:, :, row].transpose(1, 2))
    return scores * count.clamp(min=1).to(scores.dtype).rsqrt()[:, None, :, None], shown.sum(1)


def scan(
    phi: Float[Tensor, "2 batch heads n p"],
    keys: Float[Tensor, "batch heads n p"],
    values: Float[Tensor, "2 batch heads n s"],
) -> Float[Tensor, "2 batch heads n s"]:
    """Σ_{j ≤ i} ⟨φᵢ, xⱼ⟩ valuesⱼ for queries and keys."""
    n = phi.shape[-2]
    size = max(min(CHUNK, n), 1)
    padding = (0, 0, 0, -n % size)
    phi, keys, values = (pad(t, padding).unflatten(-2, (-1, size)) for t in (phi, keys, values))
    states = (keys.mT @ values).cumsum(-3)
    before = pad(states[..., :-1, :, :], (0, 0, 0, 0, 1, 0))  # the state before each chunk
    scores = (phi @ keys.mT).tril() @ values + phi @ before
    return scores.flatten(-3, -2)[..., :n, :]
