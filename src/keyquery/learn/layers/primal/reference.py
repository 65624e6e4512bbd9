"""Scores e = φ(q)W_e|X, r = φ(k)W_r|X and o = eCₑ + rCᵣ in plain torch, summed in at least float32."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

FEATURES = ("cosine", "elu")
ZERO = 1e-24  # ‖z‖² below which a vector has no direction: its features, and their gradients, are 0


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
