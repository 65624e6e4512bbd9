"""Under rotary positions a head is a family of forms, M(Δ) = QᵀR(Δ)K: its energies offset by offset.

All of it follows from the Gram matrix of [Q; K] (on data, from the covariance of queries and keys), with blocks Gq, Gk
and C = KQᵀ, and a rotation R of r dimensions:

    ‖M(Δ)‖² = tr(Gq R Gk Rᵀ)      tr(M(Δ)²) = tr(R C R C)      ⟨M(Δ), M(−Δ)ᵀ⟩ = tr(R C Rᵀ C)

The second says what happens when two contents change places and the offset stays, the third when two tokens change
places together with their positions, which is what s_ij and s_ji of a running model are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms import Rope


class Energies(NamedTuple):
    """Per offset: ‖M(Δ)‖², ‖M(−Δ)‖², tr(M(Δ)²) and ⟨M(Δ), M(−Δ)ᵀ⟩."""

    there: Float[Tensor, offsets * batch]
    back: Float[Tensor, offsets * batch]
    contents: Float[Tensor, offsets * batch]
    exchange: Float[Tensor, offsets * batch]

    def contents_symmetry(self) -> Tensor:
        """tr(M(Δ)²)/‖M(Δ)‖²: 1 if two contents may change places, the offset staying."""
        return self.contents / torch.where(self.there > 0, self.there, 1.0)

    def exchange_symmetry(self) -> Tensor:
        """The same for tokens that change places with their positions, of ½(M(Δ) ± M(−Δ)ᵀ)."""
        both = (self.there + self.back) / 2
        return self.exchange / torch.where(both > 0, both, 1.0)


def energies(gram: Float[Tensor, "*batch n n"], rope: Rope | None, offsets: Float[Tensor, " offsets"]) -> Energies:
    """Energies at each offset; without a rope they are the same at all.

    >>> form = kq.Form(torch.eye(2), torch.eye(2))
    >>> energies(form.gram(), kq.Rope(2), torch.tensor([0.0, 1.0])).contents_symmetry()  # cos 2Δ
    tensor([ 1.0000, -0.4161], dtype=torch.float64)
    """
    rank = gram.shape[-1] // 2
    gram_query, gram_key, cross = gram[..., :rank, :rank], gram[..., rank:, rank:], gram[..., rank:, :rank]
    rows = [_energies_at(gram_query, gram_key, cross, rope, float(offset)) for offset in offsets]
    return Energies(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _energies_at(
    gram_query: Tensor, gram_key: Tensor, cross: Tensor, rope: Rope | None, offset: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four energies at one offset; rotations act on r×r matrices row by row and column by column."""
    turned, unturned = _turn(gram_key, rope, offset), _turn(gram_key, rope, -offset)
    rc, rcr = _turn(cross, rope, offset, columns=False), _turn(cross, rope, offset)
    # The factor on cosine and sine belongs to queries as well as to keys.
    of_query, plain = _turn(gram_query, rope, 0.0), _turn(cross, rope, 0.0)
    rc_plain = _turn(rc, rope, 0.0, columns=False)
    there, back = (of_query * turned.mT).sum((-2, -1)), (of_query * unturned.mT).sum((-2, -1))
    return there, back, (rc_plain * rc_plain.mT).sum((-2, -1)), (rcr * plain.mT).sum((-2, -1))


def _turn(matrix: Tensor, rope: Rope | None, offset: float, columns: bool = True) -> Tensor:
    """R·X·Rᵀ, or R·X alone."""
    if rope is None or (offset == 0 and rope.factor == 1):
        return matrix
    matrix = rope.rotate(matrix, offset) if columns else matrix
    return rope.rotate(matrix.mT, offset).mT


def rotations(rope: Rope | None, offsets: Tensor, rank: int) -> Float[Tensor, "offsets r r"]:
    """R(Δ) as matrices, between a query at 0 and a key at Δ; a factor on cosine and sine counts for both."""
    eye = torch.eye(rank, dtype=torch.float64, device=offsets.device)
    if rope is None:
        return eye.expand(len(offsets), rank, rank)
    factor = rope.rotate(eye, 0.0)
    # Rows of the rotated identity are R's columns.
    return factor.mT @ rope.rotate(eye.expand(len(offsets), rank, rank), offsets[:, None].double()).mT
