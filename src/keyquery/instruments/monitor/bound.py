"""An upper bound on the logits of a head, from its weights and the largest norm of its inputs.

Without rotation, q·k = xᵀMy + b_qᵀK y + (Qᵀb_k)ᵀx + b_q·b_k ≤ σ₁(M)‖x‖‖y‖ + ‖Kᵀb_q‖‖y‖ + ‖Qᵀb_k‖‖x‖ + b_q·b_k.
RoPE rotates queries and keys against each other, which only ‖R q‖ = ‖q‖ ≤ σ₁(Q)‖x‖ + ‖b_q‖ bounds at every offset.
A norm of queries or keys bounds them whatever the weights are: ‖γ ∘ z/rms(z)‖ ≤ max|γ|·√r. A bias by offset (T5) adds
at most its largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints.layer import LatentLayer, Layer, Norm

SQUARINGS = 24  # λ₁ ≤ tr(Aᵖ)^(1/p) ≤ λ₁·r^(1/p), p = 2²⁴
AT_ONCE = 6  # squarings between two scalings: each is a kernel launch
POSITIONS = ("none", "rope", "alibi", "scaled alibi")  # whose terms are rotations, or at most 0


class Bound(NamedTuple):
    """σ₁(M) of every head, and the bound of its logits; NaN where positions or latents are not covered."""

    sigma: Float[Tensor, " heads"]
    bound: Float[Tensor, " heads"]


@torch.no_grad()
def logit_bound(layer: Layer, norm: Tensor | float) -> Bound:
    """The bound scale·max q·k of every head of a layer whose inputs have at most this norm."""
    weights = layer.weights
    query, key = weights.query.double(), weights.key.double()
    norm = torch.as_tensor(norm, dtype=torch.float64, device=query.device)
    if isinstance(layer, LatentLayer) or layer.position not in POSITIONS or layer.learned or layer.pool:
        sigma = product_norm(query, key)
        return Bound(sigma.flatten(), torch.full_like(sigma, math.nan).flatten())
    query_bias, key_bias = (None if b is None else b.double() for b in (weights.query_bias, weights.key_bias))
    normed = layer.query_norm is not None or layer.key_norm is not None
    rank = query.shape[2]
    rope = layer.rope if layer.early_rope is None else layer.early_rope
    rope = rope if layer.axial is None else layer.axial.rope
    turned = rank if normed or layer.axial is not None else 0 if rope is None else rope.dims
    factor = 1.0 if rope is None else float(rope.factor) ** 2
    grams = query @ query.mT, key @ key.mT  # blocks of these are the Gram matrices of some dimensions
    squares = _largest_eigenvalues(_core(*grams), *(gram[..., :turned, :turned] for gram in grams))
    sigma, *longest = map(_root, squares)
    sides = (
        _length(longest[0], _part(query_bias, turned), layer.query_norm, norm, turned),
        _length(longest[1].expand(longest[0].shape), _part(key_bias, turned), layer.key_norm, norm, turned),
    )
    bound = factor * sides[0] * sides[1] if turned else torch.zeros_like(sigma)
    if turned < rank:
        rest_query, rest_key = query[:, :, turned:], key[:, :, turned:]
        rest = sigma if turned == 0 else _root(largest_eigenvalue(_core(*(g[..., turned:, turned:] for g in grams))))
        bound = bound + rest * norm**2
        bound = bound + _bias_terms(rest_query, rest_key, query_bias, key_bias, turned, norm)
    bound = layer.scale * bound
    return Bound(sigma.flatten(), (bound if layer.softcap is None else bound.clamp(max=layer.softcap)).flatten())


@torch.no_grad()
def latent_bound(kernels: Sequence[LatentLayer], norm: Tensor | float) -> Float[Tensor, " heads"]:
    """The bound of latent attention (MLA): of its unrotated and its rotary kernel together.

    A latent is normed, so that q = U z with ‖z‖ ≤ √L whatever the input is; U is found from the composed weight U D and
    the down-projection D. NaN where a kernel has norms or biases beyond these.
    """
    total = torch.zeros((), dtype=torch.float64)
    for layer in kernels:
        weights = layer.gained_latents()
        if layer.query_norm is not None or layer.key_norm is not None or weights.query_bias is not None:
            return torch.full((layer.heads,), math.nan, dtype=torch.float64)
        query, query_size = _of_latent(weights.query.double(), layer.query_down, norm)
        key, key_size = _of_latent(weights.key.double(), layer.key_down, norm)
        if layer.rope is None:
            largest = product_norm(query, key)
        else:
            longest = [largest_eigenvalue(side @ side.mT).clamp(min=0).sqrt() for side in (query, key)]
            largest = float(layer.rope.factor) ** 2 * longest[0] * longest[1]
        total = total.to(largest.device) + (layer.scale * largest * query_size * key_size).flatten()
    return total


def _of_latent(weight: Tensor, down: Tensor | None, norm: Tensor | float) -> tuple[Tensor, Tensor]:
    """U of weight = U·down, and the largest norm of what it acts on; without a latent the weight itself, and `norm`."""
    if down is None:
        return weight, torch.as_tensor(norm, dtype=torch.float64, device=weight.device)
    down = down.double()
    factor, failed = torch.linalg.cholesky_ex(down @ down.mT)
    up = torch.cholesky_solve(down @ weight.mT, factor).mT
    size = torch.full((), math.sqrt(down.shape[0]), dtype=torch.float64, device=weight.device)
    return up, torch.where(failed == 0, size, math.nan)


def _part(bias: Tensor | None, turned: int) -> Tensor | None:
    return None if bias is None else bias[..., :turned]


def _length(longest: Tensor, bias: Tensor | None, norm: Norm | None, size: Tensor, dims: int) -> Tensor:
    """The largest ‖q‖ of every head for inputs of at most this norm; `longest` is σ₁ of its weight."""
    if norm is not None:
        over_all = norm.gain.shape[:2] != (1, 1) and not norm.by_head
        dims = math.prod(norm.gain.shape) if over_all else dims
        largest = norm.gain.double().abs().amax(-1) * math.sqrt(dims)
        if norm.shift is not None:
            largest = largest + torch.linalg.vector_norm(norm.shift.double(), dim=-1)
        return largest.to(longest.device).expand(longest.shape)
    length = longest * size
    return length if bias is None else length + torch.linalg.vector_norm(bias, dim=-1)


def _bias_terms(
    query: Tensor, key: Tensor, query_bias: Tensor | None, key_bias: Tensor | None, turned: int, norm: Tensor
) -> Tensor:
    total = torch.zeros(query.shape[:2], dtype=query.dtype, device=query.device)
    if query_bias is not None:
        total = total + torch.linalg.vector_norm((query_bias[..., None, turned:] @ key).squeeze(-2), dim=-1) * norm
    if key_bias is not None:
        total = total + torch.linalg.vector_norm((key_bias[..., None, turned:] @ query).squeeze(-2), dim=-1) * norm
    if query_bias is not None and key_bias is not None:
        total = total + (query_bias[..., turned:] * key_bias[..., turned:]).sum(-1)
    return total


def product_norm(query: Float[Tensor, "*batch r d"], key: Float[Tensor, "*#batch r e"]) -> Float[Tensor, "*batch"]:
    """σ₁(QᵀK), from r × r matrices: σ₁² is the largest eigenvalue of LᵀKKᵀL, with LLᵀ = QQᵀ."""
    return _root(largest_eigenvalue(product_core(query, key)))


def _root(square: Tensor) -> Tensor:
    return square.clamp(min=0).sqrt()


def product_core(query: Tensor, key: Tensor) -> Tensor:
    """LᵀKKᵀL, r × r, with LLᵀ = QQᵀ: its eigenvalues are the squared singular values of QᵀK. NaN if there is no L."""
    return _core(query @ query.mT, key @ key.mT)


def _core(gram: Tensor, other: Tensor) -> Tensor:
    """The same from QQᵀ and KKᵀ."""
    size = _trace(gram)[..., None, None]
    shift = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) * (size * 1e-13 + 1e-300)
    factor, failed = torch.linalg.cholesky_ex(gram + shift)
    factor = torch.where((failed == 0)[..., None, None], factor, torch.nan)
    return factor.mT @ other @ factor


def _largest_eigenvalues(*matrices: Tensor) -> list[Tensor]:
    """λ₁ of several batches; those of one size in one go, to save kernel launches."""
    if not matrices[0].is_cuda or len({matrix.shape[-1] for matrix in matrices}) > 1:
        return [
            largest_eigenvalue(matrix) if matrix.shape[-1] else matrix.new_zeros(matrix.shape[:-2])
            for matrix in matrices
        ]
    flat = [matrix.flatten(0, -3) for matrix in matrices]
    parts = largest_eigenvalue(torch.cat(flat)).split([len(part) for part in flat])
    return [part.reshape(matrix.shape[:-2]) for part, matrix in zip(parts, matrices, strict=True)]


def largest_eigenvalue(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """λ₁ of positive semi-definite matrices; on a GPU by repeated squaring, from above to 1e-6.

    Batched eigenvalue solvers run matrix by matrix there, which takes a hundred times as long.
    """
    if matrix.is_cuda:
        return _by_squaring(matrix)
    broken = ~matrix.isfinite().all(-1).all(-1)  # the solver raises on these
    return torch.linalg.eigvalsh(matrix.nan_to_num(0.0, 0.0, 0.0))[..., -1].masked_fill(broken, torch.nan)


def _by_squaring(matrix: Tensor) -> Tensor:
    """λ₁ ≈ tr(Aᵖ)^(1/p). Scaled to a trace of 1, λ₁ is at least 1/r, and 2⁶ powers of it are far from underflow."""
    batch, matrix = matrix.shape[:-2], matrix.flatten(0, -3) if matrix.ndim > 2 else matrix.unsqueeze(0)
    traces = [_trace(matrix)]
    for _ in range(SQUARINGS // AT_ONCE):
        matrix = matrix / traces[-1].clamp(min=1e-300)[:, None, None]
        for _ in range(AT_ONCE):
            matrix = torch.bmm(matrix, matrix)  # `@` makes five views each time
        traces.append(_trace(matrix))
    powers = 0.5 ** (AT_ONCE * torch.arange(len(traces), dtype=matrix.dtype, device=matrix.device))
    return (torch.stack(traces, -1).log() @ powers).exp().reshape(batch)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
