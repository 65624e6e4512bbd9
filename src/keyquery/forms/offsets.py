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
from torch import Tensor, nn

from keyquery.forms.rope import Rope


class Energies(NamedTuple):
    """Per offset: ‖M(Δ)‖², ‖M(−Δ)‖², tr(M(Δ)²) and ⟨M(Δ), M(−Δ)ᵀ⟩."""

    there: Float[Tensor, "offsets *batch"]
    back: Float[Tensor, "offsets *batch"]
    contents: Float[Tensor, "offsets *batch"]
    exchange: Float[Tensor, "offsets *batch"]

    def contents_symmetry(self) -> Tensor:
        """tr(M(Δ)²)/‖M(Δ)‖²: 1 if swapping two contents at the same offset leaves the score unchanged."""
        return self.contents / torch.where(self.there > 0, self.there, 1.0)

    def exchange_symmetry(self) -> Tensor:
        """The same for tokens swapped together with their positions, of ½(M(Δ) ± M(−Δ)ᵀ)."""
        both = (self.there + self.back) / 2
        return self.exchange / torch.where(both > 0, both, 1.0)


def energies(gram: Float[Tensor, "*batch n n"], rope: Rope | None, offsets: Float[Tensor, " offsets"]) -> Energies:
    """Energies at each offset; without a rope they are the same at all offsets.

    A plane of RoPE is one complex coordinate z, and a block of a matrix between two planes maps z to Pz + Nz̄. Rotations
    only change the phases of P and N, so that each trace is Re Σ coefficient·phase over pairs of planes, with
    coefficients of the head alone and phases of the offsets alone.
    """
    rank = gram.shape[-1] // 2
    gram_query, gram_key, cross = gram[..., :rank, :rank], gram[..., rank:, rank:], gram[..., rank:, :rank]
    if rope is None:
        norm, trace = ((left * right.mT).sum((-2, -1)) for left, right in ((gram_query, gram_key), (cross, cross)))
        return Energies(*(value.expand(len(offsets), *gram.shape[:-2]) for value in (norm, norm, trace, trace)))
    (p_query, n_query), (p_key, n_key), (p, n) = (_in_planes(t, rope) for t in (gram_query, gram_key, cross))
    frequencies = nn.functional.pad(rope.angles(gram.new_ones(())), (0, p.shape[-1] - rope.dims // 2))
    # The factor on cosine and sine belongs to queries as well as to keys.
    factors = torch.ones_like(frequencies)
    factors[: rope.dims // 2] = rope.factor**2
    alike, apart = frequencies[:, None] - frequencies, frequencies[:, None] + frequencies
    phases = [
        torch.polar(2 * (factors[:, None] * factors).expand(len(angle), -1, -1), angle)
        for angle in (offsets.to(gram.device, torch.float64)[:, None, None] * frequency for frequency in (alike, apart))
    ]
    norms, traces = (p_query.conj() * p_key, n_query.conj() * n_key), (p * p.mT, n * n.conj().mT)
    there, exchange = (_traced(pair, phases) for pair in (norms, traces))
    back = _traced(norms, [phase.conj() for phase in phases])
    return Energies(there, back, _traced(traces, phases[::-1]), exchange)


def _in_planes(matrix: Float[Tensor, "*batch r r"], rope: Rope) -> tuple[Tensor, Tensor]:
    """P and N of every pair of planes, (..., planes, planes), complex; dimensions that are not rotated by twos."""
    odd = matrix.shape[-1] % 2
    matrix = nn.functional.pad(matrix, (0, odd, 0, odd))
    rotated, rest = torch.arange(matrix.shape[-1], device=matrix.device).tensor_split([rope.dims])
    rotated = rotated.reshape(-1, 2) if rope.interleaved else rotated.reshape(2, -1).mT
    first, second = torch.cat((rotated, rest.reshape(-1, 2))).unbind(1)
    rows = matrix[..., first, :], matrix[..., second, :]
    (a, b), (c, d) = ((row[..., first], row[..., second]) for row in rows)
    return torch.complex((a + d) / 2, (c - b) / 2), torch.complex((a - d) / 2, (c + b) / 2)


def _traced(parts: tuple[Tensor, Tensor], phases: list[Tensor]) -> Float[Tensor, "offsets *batch"]:
    """Re Σ coefficient·phase of both parts, for every offset."""
    flat = [torch.view_as_real(part.conj().resolve_conj()).flatten(-3) for part in parts]
    turned = [torch.view_as_real(phase.resolve_conj()).flatten(1) for phase in phases]
    traces = sum(phase @ part.reshape(-1, part.shape[-1]).mT for part, phase in zip(flat, turned, strict=True))
    return torch.as_tensor(traces).reshape(-1, *parts[0].shape[:-2])


def rotations(rope: Rope | None, offsets: Tensor, rank: int) -> Float[Tensor, "offsets r r"]:
    """R(Δ) as matrices, between a query at 0 and a key at Δ; a factor on cosine and sine applies to both."""
    eye = torch.eye(rank, dtype=torch.float64, device=offsets.device)
    if rope is None:
        return eye.expand(len(offsets), rank, rank)
    factor = rope.rotate(eye, offsets.new_zeros(()))
    # Rows of the rotated identity are R's columns.
    return factor.mT @ rope.rotate(eye.expand(len(offsets), rank, rank), offsets[:, None].double()).mT
