"""The heart of a primal layer in plain torch: o = φ(q)M_e + φ(k)M_r + b and the Gram matrices of φ(q) and φ(k).

All else (projection weights, loss, spectrum) is made of these small matrices: Σᵢ eᵢₗ² = wₗᵀGwₗ. `triton` has the same
two functions, with the same signatures. Sums are taken in at least float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.layers.primal.features import ZERO

CHUNK = 2048  # tokens at a time, so that features stay in a CPU's cache


def forward(
    qk: Float[Tensor, "batch n 2 heads p"],
    maps: Float[Tensor, "2 batch heads p v"],
    bias: Float[Tensor, " v"],
    real: Bool[Tensor, "batch n"] | None,
    feature: str,
) -> tuple[Float[Tensor, "batch n heads v"], Float[Tensor, "2 batch heads p p"]]:
    """o = φ(q)·M_e + φ(k)·M_r + b, and G = Σ φφᵀ over real tokens for queries and keys; padding gives b."""
    batch, n, _, heads, p = qk.shape
    exact = torch.promote_types(qk.dtype, torch.float32)
    out = qk.new_empty(batch, n, heads, maps.shape[-1])
    grams = torch.zeros(2, batch, heads, p, p, dtype=exact, device=qk.device)
    small, offset = maps.to(exact), bias.to(exact)
    for here in _chunks(n, qk.is_cuda):
        phi, _ = features(qk[:, here], _at(real, here), feature, exact)
        o = phi[0] @ small[0]
        o += phi[1] @ small[1]
        o += offset
        out[:, here] = o.transpose(1, 2)
        grams += phi.mT @ phi
    return out, grams


def backward(
    qk: Float[Tensor, "batch n 2 heads p"],
    maps: Float[Tensor, "2 batch heads p v"],
    real: Bool[Tensor, "batch n"] | None,
    feature: str,
    grad: Float[Tensor, "batch n heads v"],
    grad_grams: Float[Tensor, "2 batch heads p p"] | None,
) -> tuple[Float[Tensor, "batch n 2 heads p"], Float[Tensor, "2 batch heads p v"], Float[Tensor, " v"]]:
    """Gradients of qk, maps and bias; features are computed again."""
    exact = torch.promote_types(qk.dtype, torch.float32)
    grad_qk = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    grad_maps = torch.zeros(maps.shape, dtype=exact, device=qk.device)
    grad_bias = torch.zeros(maps.shape[-1], dtype=exact, device=qk.device)
    back = maps.to(exact).mT
    both = None if grad_grams is None else (grad_grams + grad_grams.mT).to(exact)
    for here in _chunks(qk.shape[1], qk.is_cuda):
        phi, scale = features(qk[:, here], _at(real, here), feature, exact)
        g = grad[:, here].transpose(1, 2).to(exact)
        grad_phi = g @ back
        if both is not None:
            grad_phi += phi @ both
        grad_maps += phi.mT @ g
        grad_bias += g.sum((0, 1, 2))
        grad_qk[:, here] = _through(grad_phi, phi, scale, feature).permute(1, 3, 0, 2, 4)
    return grad_qk, grad_maps, grad_bias


def features(
    qk: Float[Tensor, "batch n 2 heads p"], real: Bool[Tensor, "batch n"] | None, feature: str, exact: torch.dtype
) -> tuple[Float[Tensor, "2 batch heads n p"], Float[Tensor, "#2 #batch #heads #n #1"] | None]:
    """φ(q) and φ(k), 0 at padding, and what backward multiplies by: 1/‖z‖ for cosine, whether a token is real else."""
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
    """The gradient of z of that of φ(z)."""
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
