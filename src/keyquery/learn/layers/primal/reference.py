"""Primal-Attention in plain torch: the tokens f(X), projection weights, features, scores, and the causal form.

Scores are e = φ(q)W_e|X and r = φ(k)W_r|X, outputs o = eCₑ + rCᵣ, summed in at least float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

FEATURES = ("cosine", "elu")
ZERO = 1e-24  # ‖z‖² below which a vector has no direction: its features, and their gradients, are 0
CHUNK = 64  # tokens that the causal form takes at a time


def evenly(
    n: int, most: int, real: Bool[Tensor, "batch n"] | None, device: torch.device
) -> tuple[Int[Tensor, "*batch rows"], Bool[Tensor, "batch rows"] | None]:
    """Indices of min(most, n) evenly spaced tokens, including first and last; of real tokens if `real` is not None.

    A sample with fewer real tokens than rows uses only its first rows; the second output marks them.
    """
    rows = min(most, n)
    row = torch.arange(rows, device=device)
    if real is None:
        return row * (n - 1) // max(rows - 1, 1), None
    count = real.sum(1, keepdim=True)
    used = count.clamp(max=rows)
    among = row * (count - 1) // (used - 1).clamp(min=1)  # rank among the real tokens
    positions = torch.searchsorted(real.cumsum(1), among.minimum(count - 1) + 1).clamp(max=n - 1)
    return positions, row < used


def take(x: Float[Tensor, "batch n d"], positions: Int[Tensor, "*batch rows"]) -> Float[Tensor, "batch rows d"]:
    """Tokens of x at these positions."""
    if positions.ndim == 1:
        return x.index_select(1, positions)
    return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def weigh(
    sample: Float[Tensor, "batch rows heads p"], directions: Float[Tensor, "2 heads rows s"]
) -> Float[Tensor, "2 batch heads p s"]:
    """W_e|X = Σⱼ xⱼWe[j]ᵀ and W_r|X = Σⱼ xⱼWr[j]ᵀ of every head, over sampled tokens."""
    s = directions.shape[-1]
    both = directions.permute(1, 2, 0, 3).flatten(2)
    aligned = pad(both, (0, -2 * s % 8))  # products of other widths are many times slower on a GPU
    products = torch.bmm(sample.permute(2, 0, 3, 1).flatten(1, 2), aligned)[..., : 2 * s]
    return products.unflatten(1, (len(sample), sample.shape[-1])).unflatten(-1, (2, s)).permute(3, 1, 0, 2, 4)


def features(
    qk: Float[Tensor, "batch n 2 heads p"], real: Bool[Tensor, "batch n"] | None, feature: str, dtype: torch.dtype
) -> Float[Tensor, "2 batch heads n p"]:
    """φ(q) and φ(k), 0 at padding."""
    z = qk.permute(2, 0, 3, 1, 4).to(dtype)
    if feature == "cosine":
        square = z.square().sum(-1, keepdim=True)
        phi = z * (square.clamp(min=ZERO).rsqrt() * (square > ZERO))
    else:
        phi = torch.where(z > 0, z + 1, z.clamp(max=0).exp())
    return phi if real is None else phi * real[:, None, :, None]


def attend(
    phi: Float[Tensor, "2 batch heads n p"],
    weights: Float[Tensor, "2 batch heads p s"],
    mix: Float[Tensor, "2 s v"],
) -> tuple[Float[Tensor, "batch n heads v"], Float[Tensor, "2 batch heads s"]]:
    """o = eCₑ + rCᵣ, and Σe² and Σr² over tokens."""
    scores = phi @ weights.to(phi.dtype)
    mix = mix.to(phi.dtype)
    out = scores[0] @ mix[0] + scores[1] @ mix[1]
    return out.transpose(1, 2), scores.square().sum(-2)


def causal_scores(
    phi: Float[Tensor, "2 batch heads n p"],
    keys: Float[Tensor, "batch heads n p"],
    directions: Float[Tensor, "2 heads rows s"],
    real: Bool[Tensor, "batch n"] | None,
) -> tuple[Float[Tensor, "2 batch heads n s"], Int[Tensor, " batch"]]:
    """eᵢ = Σ_{j ≤ i} ⟨φ(qᵢ), xⱼ⟩ We[j mod rows]/√(tokens up to i), rᵢ likewise, and the number of tokens per sample.

    j counts real tokens; padding must be 0. The theory of KSVD covers the other form only.
    """
    shown = keys.new_ones(keys.shape[0], keys.shape[2], dtype=torch.bool) if real is None else real
    count = shown.cumsum(1)
    row = (count - 1).clamp(min=0) % directions.shape[2]  # (batch, n)
    scores = scan(phi, keys, directions[:, :, row].transpose(1, 2))
    return scores * count.clamp(min=1).to(scores.dtype).rsqrt()[:, None, :, None], shown.sum(1)


def scan(
    phi: Float[Tensor, "2 batch heads n p"],
    keys: Float[Tensor, "batch heads n p"],
    values: Float[Tensor, "2 batch heads n s"],
) -> Float[Tensor, "2 batch heads n s"]:
    """Σ_{j ≤ i} ⟨φᵢ, xⱼ⟩ valuesⱼ for queries and keys: a prefix sum, in chunks, in linear time."""
    n = phi.shape[-2]
    size = max(min(CHUNK, n), 1)
    padding = (0, 0, 0, -n % size)
    phi, keys, values = (pad(t, padding).unflatten(-2, (-1, size)) for t in (phi, keys, values))
    states = (keys.mT @ values).cumsum(-3)
    before = pad(states[..., :-1, :, :], (0, 0, 0, 0, 1, 0))  # the state before each chunk
    scores = (phi @ keys.mT).tril() @ values + phi @ before
    return scores.flatten(-3, -2)[..., :n, :]
