"""Spectra of a layer's heads, norms and energies of RoPE planes, from one float32 Gram matrix per head.

The products of width d are in float32, which is enough for gaps between neighbouring singular values; everything after
them, in 2r dimensions, is in float64. Heads whose rows are dependent, tied or nearly so, are computed by their `Form`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Layer
from keyquery.forms import Form
from keyquery.forms.core import eigenvalues, inner

TRUSTED = 1e-3  # smallest diagonal entry of the Cholesky factor of unit rows, at which float32 products keep 3 digits
SMALLEST = 1e-8  # squared singular values relative to the largest, at which float64 squares keep 7 digits of them


class Spectra(NamedTuple):
    """Of all heads of a layer, in one row each."""

    values: Float[Tensor, "heads 4 r"]  # σ(M), λ₊(S), λ₋(S), σ(A) with one of each pair
    norm: Float[Tensor, " heads"]  # ‖M‖
    planes: Float[Tensor, "heads planes"] | None  # ‖Q_pᵀ K_p‖/‖M‖ of each plane p that RoPE rotates


def spectra(layer: Layer, form: Form) -> Spectra:
    """Spectra of the heads of a layer; `form` has at least one dimension of heads."""
    query, key = (factor.float() for factor in (form.query, form.key))
    own, other = query @ query.mT, key @ key.mT
    planes = _planes(layer, own, other)
    fast = fast_values(query, key, own, other) if 2 * form.rank <= form.dim else None
    if fast is None:
        values, norm = spectra_of(form), form.norm()
    else:
        values, norm = fast
    norm = norm.clamp(min=1e-300)
    planes = None if planes is None else (planes / norm.unsqueeze(-1)).flatten(0, -2)
    return Spectra(values.flatten(0, -3), norm.flatten(), planes)


def spectra_of(form: Form) -> Float[Tensor, "*heads 4 r"]:
    """Singular values of M, positive and absolute negative eigenvalues of S, singular values of A, one per pair."""
    return _joined(form.singular_values(), form.symmetric_eigenvalues(), form.skew_values()[..., ::2], form.rank)


def _joined(values: Tensor, eigenvalues: Tensor, skew: Tensor, r: int) -> Float[Tensor, "*heads 4 r"]:
    positive, negative = ((sign * eigenvalues).clamp(min=0).sort(descending=True).values for sign in (1, -1))
    return torch.stack([_filled(row, r) for row in (values, positive, negative, skew)], -2)


def _filled(row: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(row[..., :width], (0, max(width - row.shape[-1], 0)))


def fast_values(query: Tensor, key: Tensor, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """Spectra and norms from the Gram matrix of [Q; K]; None where float32 products are not enough.

    A group of heads, or a head, at a time, since its matrices fit into a cache.
    """
    cross = inner(query, key)
    groups = []
    for three in zip(own, other, cross, strict=True):
        if (group := _from_gram(*three)) is None:
            return None
        groups.append(group)
    values, norms = zip(*groups, strict=True)
    return torch.stack(values), torch.stack(norms)


def _from_gram(own: Tensor, other: Tensor, cross: Tensor) -> tuple[Tensor, Tensor] | None:
    """Spectra and norms from QQᵀ, KKᵀ and QKᵀ.

    With the Cholesky factor [L₁ 0; L₂ L₃] of the Gram matrix, M is L₁ᵀ[L₂ L₃] = [C D] in the basis of its first r rows,
    and 0 in the others.
    """
    r = cross.shape[-1]
    gram = torch.empty(*cross.shape[:-2], 2 * r, 2 * r, dtype=torch.float64)
    gram[..., :r, :r], gram[..., r:, r:] = own, other
    gram[..., :r, r:], gram[..., r:, :r] = cross, cross.mT
    size = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    if not bool((size > 0).all()):
        return None
    gram /= size.unsqueeze(-1) * size.unsqueeze(-2)
    rows, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed.any()) or float(rows.diagonal(dim1=-2, dim2=-1).min()) < TRUSTED:
        return None
    rows *= size.unsqueeze(-1)
    matrix = rows[..., :r, :r].mT @ rows[..., r:, :]
    squares = [eigenvalues(part).flip(-1) for part in (matrix @ matrix.mT, _skew_square(matrix))]
    if any(bool((values[..., r - 1] < SMALLEST * values[..., 0]).any()) for values in squares):
        return None
    singular, turning = (values.clamp(min=0).sqrt() for values in squares)
    return _joined(singular, eigenvalues(_symmetric(matrix)), turning[..., ::2], r), torch.linalg.matrix_norm(matrix)


def _symmetric(matrix: Float[Tensor, "*heads r n"]) -> Float[Tensor, "*heads n n"]:
    """S of M = [C D; 0 0]: [C + Cᵀ, D; Dᵀ, 0]/2."""
    r = matrix.shape[-2]
    first, last = matrix[..., :r], matrix[..., r:] / 2
    found = matrix.new_zeros(*matrix.shape[:-2], 2 * r, 2 * r)
    found[..., :r, :r], found[..., :r, r:], found[..., r:, :r] = (first + first.mT) / 2, last, last.mT
    return found


def _skew_square(matrix: Float[Tensor, "*heads r n"]) -> Float[Tensor, "*heads n n"]:
    """AAᵀ of M = [C D; 0 0]: with A = [E F; −Fᵀ 0], E = (C − Cᵀ)/2 and F = D/2, it is [EEᵀ + FFᵀ, −EF; FᵀE, FᵀF]."""
    r = matrix.shape[-2]
    first, last = matrix[..., :r], matrix[..., r:] / 2
    both = torch.cat(((first - first.mT) / 2, last), -1)
    corner = both[..., :r] @ last
    found = matrix.new_empty(*matrix.shape[:-2], 2 * r, 2 * r)
    found[..., :r, :r], found[..., r:, r:] = both @ both.mT, last.mT @ last
    found[..., :r, r:], found[..., r:, :r] = -corner, -corner.mT
    return found


def _planes(layer: Layer, own: Tensor, other: Tensor) -> Float[Tensor, "*heads planes"] | None:
    """‖Q_pᵀ K_p‖ of each plane p that RoPE rotates: ‖QᵀK‖² = Σ (QQᵀ)∘(KKᵀ), over the two rows of a plane."""
    if layer.rope is None or layer.rope.dims < 8:
        return None
    dims = layer.rope.dims
    order = torch.arange(dims).reshape(-1, 2).T if layer.rope.interleaved else torch.arange(dims).reshape(2, -1)
    square = torch.zeros(())
    for one, two in ((0, 0), (0, 1), (1, 1)):
        products = [side[..., order[one], order[two]].double() for side in (own, other)]
        square = square + (1 + (one != two)) * products[0] * products[1]
    return square.clamp(min=0).sqrt()
