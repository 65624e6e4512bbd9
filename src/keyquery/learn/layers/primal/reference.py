"""Reference implementation in plain torch: scores e = φ(q)W_e|X, r = φ(k)W_r|X, o = eCₑ + rCᵣ, and sums of them.

`kernels.operators` has the same two functions with the same signatures. Sums are computed in at least float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.learn.layers.primal.features import ZERO

Grams = Float[Tensor, "2 batch heads p p"]
CHUNK = 2048  # tokens per block, so that features stay in the cache of a CPU


def forward(
    qk: Float[Tensor, "batch n 2 heads p"],
    weights: Float[Tensor, "2 batch heads p s"],
    mix: Float[Tensor, "2 s v"],
    real: Bool[Tensor, "batch n"] | None,
    feature: str,
    gram: bool,
) -> tuple[Float[Tensor, "batch n heads v"], Float[Tensor, "2 batch heads s"], Grams | None]:
    """o = eCₑ + rCᵣ, Σe² and Σr² over real tokens, and with `gram` the Gram matrices Σφφᵀ; padding gives 0."""
    batch, n, _, heads, p = qk.shape
    exact = torch.promote_types(qk.dtype, torch.float32)
    out = qk.new_empty(batch, n, heads, mix.shape[-1])
    energy = torch.zeros(2, batch, heads, weights.shape[-1], dtype=exact, device=qk.device)
    grams = torch.zeros(2, batch, heads, p, p, dtype=exact, device=qk.device) if gram else None
    weights, mix = weights.to(exact), mix.to(exact)
    for here in _chunks(n, qk.is_cuda):
        phi, _ = features(qk[:, here], _at(real, here), feature, exact)
        scores = phi @ weights
        o = scores[0] @ mix[0]
        o += scores[1] @ mix[1]
        out[:, here] = o.transpose(1, 2)
        energy += scores.square().sum(-2)
        if grams is not None:
            grams += phi.mT @ phi
    return out, energy, grams


def backward(
    qk: Float[Tensor, "batch n 2 heads p"],
    weights: Float[Tensor, "2 batch heads p s"],
    mix: Float[Tensor, "2 s v"],
    real: Bool[Tensor, "batch n"] | None,
    feature: str,
    grad: Float[Tensor, "batch n heads v"],
    grad_energy: Float[Tensor, "2 batch heads s"] | None,
    grad_grams: Float[Tensor, "2 batch heads p p"] | None,
) -> tuple[Float[Tensor, "batch n 2 heads p"], Float[Tensor, "2 batch heads p s"], Float[Tensor, "2 s v"]]:
    """Gradients of qk, weights and mix; features and scores are recomputed."""
    exact = torch.promote_types(qk.dtype, torch.float32)
    grad_qk = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    grad_weights = torch.zeros(weights.shape, dtype=exact, device=qk.device)
    grad_mix = torch.zeros(mix.shape, dtype=exact, device=qk.device)
    weights, mix = weights.to(exact), mix.to(exact)
    curve = None if grad_grams is None else (grad_grams + grad_grams.mT).to(exact)
    for here in _chunks(qk.shape[1], qk.is_cuda):
        phi, scale = features(qk[:, here], _at(real, here), feature, exact)
        g = grad[:, here].transpose(1, 2).to(exact)
        scores = phi @ weights
        grad_mix += (scores.mT @ g).sum((1, 2))
        back = g @ mix.mT[:, None, None]
        if grad_energy is not None:
            back += scores * (2 * grad_energy).unsqueeze(-2).to(exact)
        grad_weights += phi.mT @ back
        grad_phi = back @ weights.mT
        if curve is not None:
            grad_phi += phi @ curve
        grad_qk[:, here] = _through(grad_phi, phi, scale, feature).permute(1, 3, 0, 2, 4)
    return grad_qk, grad_weights, grad_mix


def features(
    qk: Float[Tensor, "batch n 2 heads p"], real: Bool[Tensor, "batch n"] | None, feature: str, exact: torch.dtype
) -> tuple[Float[Tensor, "2 batch heads n p"], Float[Tensor, "#2 #batch #heads #n #1"] | None]:
    """φ(q) and φ(k), 0 at padding, and the factor of backward: 1/‖z‖ for cosine, else whether a token is real."""
    z = qk.permute(2, 0, 3, 1, 4).to(exact)
    shown = None if real is None else real[:, None, :, None].to(exact)
    if feature == "cosine":
        square = z.square().sum(-1, keepdim=True)
        scale = square.clamp(min=ZERO).rsqrt() * (square > ZERO)
        scale = scale if shown is None else scale * shown
        return z.contiguous() * scale, scale
    phi = torch.where(z > 0, z + 1, z.clamp(max=0).exp()) if feature == "elu" else z
    phi = phi if shown is None else phi * shown
    return phi.contiguous(), None if shown is None else shown[None]


def _through(grad: Tensor, phi: Tensor, scale: Tensor | None, feature: str) -> Tensor:
    """The gradient of z from that of φ(z)."""
    if feature == "cosine":
        grad = grad - phi * (grad * phi).sum(-1, keepdim=True)
    if feature == "elu":
        grad = grad * phi.clamp(max=1)  # the slope of elu is 1, and exp(z) = φ below 0
    return grad if scale is None else grad * scale


def _chunks(n: int, whole: bool) -> list[slice]:
    size = n if whole else CHUNK
    return [slice(start, start + size) for start in range(0, n, max(size, 1))]


def _at(real: Tensor | None, here: slice) -> Tensor | None:
    return None if real is None else real[:, here]
