"""An upper bound on the logits of a head, from its weights and the largest norm of its inputs.

Without rotation, q·k = xᵀMy + b_qᵀK y + (Qᵀb_k)ᵀx + b_q·b_k ≤ σ₁(M)‖x‖‖y‖ + ‖Kᵀb_q‖‖y‖ + ‖Qᵀb_k‖‖x‖ + b_q·b_k.
RoPE rotates queries and keys against each other, which only ‖R q‖ = ‖q‖ ≤ σ₁(Q)‖x‖ + ‖b_q‖ bounds at every offset.
A norm of queries or keys bounds them whatever the weights are: ‖γ ∘ z/rms(z)‖ ≤ max|γ|·√r. A bias by offset (T5) adds
at most its largest entry. Where positions or latents are not covered the bound is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.layer import LatentLayer, Norm
from keyquery.instruments.monitor.layers import together

SQUARINGS = 24  # λ₁ ≤ tr(Aᵖ)^(1/p) ≤ λ₁·r^(1/p), p = 2²⁴
POSITIONS = ("none", "rope", "alibi", "scaled alibi")  # whose terms are rotations, or at most 0


class Bound(NamedTuple):
    """σ₁(M) of every head, and the bound of its logits."""

    sigma: Float[Tensor, " heads"]
    bound: Float[Tensor, " heads"]


@torch.no_grad()
def logit_bounds(
    layers: Mapping[str, Layer], norms: Mapping[str, Tensor | float], heads: Heads | None = None
) -> dict[str, Bound]:
    """The bound scale·max q·k of every head by module, for inputs of these norms; `heads` has biases by offset."""
    products: dict[Any, tuple[Tensor, ...]] = {}
    factors: dict[Any, tuple[Tensor, ...]] = {}
    for name, layer in layers.items():
        query, key, rotated = layer.weights.query, layer.weights.key, _rotated(layer)
        products[name, "whole"] = (query, key)
        if _covered(layer, heads) and rotated:
            factors |= {(name, "query"): (query[:, :, :rotated],), (name, "key"): (key[:, :, :rotated],)}
            if rotated < query.shape[2]:
                products[name, "rest"] = (query[:, :, rotated:], key[:, :, rotated:])
    squares: dict[Any, Tensor] = {**together(product_core, products), **together(_gram, factors)}
    largest = together(largest_eigenvalue, {key: (matrix,) for key, matrix in squares.items()})
    sizes = {key: square.clamp(min=0).sqrt() for key, square in largest.items()}
    results = {}
    for name, layer in layers.items():
        sigma = sizes[name, "whole"]
        bound = torch.full_like(sigma, math.nan)
        if _covered(layer, heads):
            norm = torch.as_tensor(norms[name], dtype=torch.float64, device=sigma.device)
            bound = _bound(layer, norm, {part: sizes[name, part] for _, part in sizes if (name, part) in sizes})
            if heads is not None and has_bias_table(layer):
                bound = bound + bias_table(heads, layer).amax(0).to(bound).view_as(bound)
        results[name] = Bound(sigma.flatten(), bound.flatten())
    return results


def has_bias_table(layer: Layer) -> bool:
    """Whether a relative position bias is added to its scores (T5)."""
    return layer.position == "t5" and "bias_table" in layer.modules


def bias_table(heads: Heads, layer: Layer) -> Tensor:
    """The biases of a layer that has them, (buckets, heads)."""
    return heads.source.rows(layer.modules["bias_table"] + ".weight").double()


def _covered(layer: Layer, heads: Heads | None) -> bool:
    known = layer.position in POSITIONS or (heads is not None and has_bias_table(layer))
    return known and not (isinstance(layer, LatentLayer) or layer.learned or layer.pool)


def _rope(layer: Layer) -> Any:
    return layer.axial.rope if layer.axial is not None else layer.rope or layer.early_rope


def _rotated(layer: Layer) -> int:
    """Dimensions of which the lengths of query and key are bounded: those that are rotated, or normed."""
    normed, rope = layer.query_norm is not None or layer.key_norm is not None, _rope(layer)
    return layer.weights.query.shape[2] if normed or layer.axial is not None else 0 if rope is None else rope.dims


def _bound(layer: Layer, norm: Tensor, sizes: Mapping[str, Tensor]) -> Tensor:
    weights, rotated, rope = layer.weights, _rotated(layer), _rope(layer)
    query_bias, key_bias = (None if b is None else b.double() for b in (weights.query_bias, weights.key_bias))
    total = torch.zeros_like(sizes["whole"])
    if rotated:
        factor = 1.0 if rope is None else float(rope.factor) ** 2
        longest = _length(sizes["query"], query_bias, layer.query_norm, norm, rotated)
        total = factor * longest * _length(sizes["key"], key_bias, layer.key_norm, norm, rotated)
    if rotated < weights.query.shape[2]:
        total = total + sizes["rest" if rotated else "whole"] * norm**2
        query, key = (weight[:, :, rotated:].double() for weight in (weights.query, weights.key))
        biases = [None if bias is None else bias[..., rotated:] for bias in (query_bias, key_bias)]
        for bias, weight in zip(biases, (key, query), strict=True):
            if bias is not None:
                total = total + torch.linalg.vector_norm((bias[..., None, :] @ weight).squeeze(-2), dim=-1) * norm
        if biases[0] is not None and biases[1] is not None:
            total = total + (biases[0] * biases[1]).sum(-1)
    total = layer.scale * total
    return total if layer.softcap is None else total.clamp(max=layer.softcap)


def _length(longest: Tensor, bias: Tensor | None, norm: Norm | None, size: Tensor, dims: int) -> Tensor:
    """The largest ‖q‖ of every head for inputs of at most this norm; `longest` is σ₁ of its weight."""
    if norm is None:
        length = longest * size
        return length if bias is None else length + torch.linalg.vector_norm(bias[..., :dims], dim=-1)
    over_all = norm.gain.shape[:2] != (1, 1) and not norm.by_head
    largest = norm.gain.double().abs().amax(-1) * math.sqrt(math.prod(norm.gain.shape) if over_all else dims)
    if norm.shift is not None:
        largest = largest + torch.linalg.vector_norm(norm.shift.double(), dim=-1)
    return largest.to(longest.device).expand(longest.shape)


def product_core(query: Float[Tensor, "*batch r d"], key: Float[Tensor, "*#batch r e"]) -> Float[Tensor, "*batch r r"]:
    """LᵀKKᵀL with LLᵀ = QQᵀ: its eigenvalues are the squared singular values of QᵀK. NaN if there is no L."""
    gram = _gram(query)
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    shift = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) * (size * 1e-13 + 1e-300)
    factor, failed = torch.linalg.cholesky_ex(gram + shift)
    factor = torch.where((failed == 0)[..., None, None], factor, torch.nan)
    return factor.mT @ _gram(key) @ factor


def _gram(factor: Tensor) -> Tensor:
    wide = factor.double()
    return wide @ wide.mT


def largest_eigenvalue(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """λ₁ of positive semi-definite matrices, from above to 1e-6: tr(Aᵖ)^(1/p), for which no host waits on a GPU."""
    logarithm = torch.zeros(matrix.shape[:-2], dtype=matrix.dtype, device=matrix.device)
    for power in range(SQUARINGS + 1):
        trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=1e-300)
        logarithm = logarithm + trace.log() * 0.5**power
        matrix = matrix / trace[..., None, None]
        matrix = matrix @ matrix
    return logarithm.exp()
