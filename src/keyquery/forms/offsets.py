"""The forms M(Δ) = QᵀR(Δ)K of a head under RoPE: energies per offset.

All of it follows from the Gram matrix of [Q; K] (on data, from the covariance of queries and keys), with blocks Gq, Gk
and C = KQᵀ, and a rotation R of r dimensions:

    ‖M(Δ)‖² = tr(Gq R Gk Rᵀ)      tr(M(Δ)²) = tr(R C R C)      ⟨M(Δ), M(−Δ)ᵀ⟩ = tr(R C Rᵀ C)

The second compares two contents swapped at the same offset, the third two tokens swapped together with their positions,
as s_ij and s_ji of a running model are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.rope import Rope


class Energies(NamedTuple):
    """Per offset: ‖M(Δ)‖², ‖M(−Δ)‖², tr(M(Δ)²) and ⟨M(Δ), M(−Δ)ᵀ⟩."""

    there: Float[Tensor, offsets * batch]
    back: Float[Tensor, offsets * batch]
    contents: Float[Tensor, offsets * batch]
    exchange: Float[Tensor, offsets * batch]

    def contents_symmetry(self) -> Tensor:
        """tr(M(Δ)²)/‖M(Δ)‖²: 1 if swapping two contents at the same offset leaves the score unchanged."""
        return self.contents / torch.where(self.there > 0, self.there, 1.0)

    def exchange_symmetry(self) -> Tensor:
        """The same for tokens swapped together with their positions, of ½(M(Δ) ± M(−Δ)ᵀ)."""
        both = (self.there + self.back) / 2
        return self.exchange / torch.where(both > 0, both, 1.0)


def energies(gram: Float[Tensor, "*batch n n"], rope: Rope | None, offsets: Float[Tensor, " offsets"]) -> Energies:
    """Energies at each offset; without a rope they are the same at all offsets.

    >>> form = kq.Form(torch.eye(2), torch.eye(2))
    >>> energies(form.gram(), kq.Rope(2), torch.tensor([0.0, 1.0])).contents_symmetry()  # cos 2Δ
    tensor([ 1.0000, -0.4161], dtype=torch.float64)
    """
    rank = gram.shape[-1] // 2
    at = offsets.double().reshape(-1, *[1] * (gram.ndim - 1))
    gram_query, gram_key, cross = gram[..., :rank, :rank], gram[..., rank:, rank:], gram[..., rank:, :rank]
    # The factor on cosine and sine belongs to queries as well as to keys.
    gram_query, plain = (_rows(_columns(t, rope, 0.0), rope, 0.0) for t in (gram_query, cross))
    turned, unturned = (_rows(_columns(gram_key, rope, place), rope, place) for place in (at, -at))
    rc = _rows(cross, rope, at)
    rcr, rc = _columns(rc, rope, at), _rows(rc, rope, 0.0)
    pairs = ((gram_query, turned), (gram_query, unturned), (rc, rc), (rcr, plain))
    traces = ((left * right.mT).sum((-2, -1)) for left, right in pairs)
    return Energies(*(trace.expand(len(offsets), *gram.shape[:-2]) for trace in traces))


def _columns(matrix: Tensor, rope: Rope | None, place: float | Tensor) -> Tensor:
    """X·Rᵀ, at every offset."""
    unturned = rope is None or (isinstance(place, float) and rope.factor == 1)
    return matrix if rope is None or unturned else rope.rotate(matrix, place)


def _rows(matrix: Tensor, rope: Rope | None, place: float | Tensor) -> Tensor:
    """R·X, at every offset."""
    return _columns(matrix.mT, rope, place).mT


def rotations(rope: Rope | None, offsets: Tensor, rank: int) -> Float[Tensor, "offsets r r"]:
    """R(Δ) as matrices, between a query at 0 and a key at Δ; a factor on cosine and sine applies to both."""
    eye = torch.eye(rank, dtype=torch.float64, device=offsets.device)
    if rope is None:
        return eye.expand(len(offsets), rank, rank)
    factor = rope.rotate(eye, 0.0)
    # Rows of the rotated identity are R's columns.
    return factor.mT @ rope.rotate(eye.expand(len(offsets), rank, rank), offsets[:, None].double()).mT
