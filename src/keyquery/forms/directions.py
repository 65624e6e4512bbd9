"""The directions of a form: singular vectors, eigenvectors of S and rotation planes of A."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.core import Core, balanced, product_svd, restored, span
from keyquery.forms.derivatives import refuse_nan
from keyquery.forms.display import brief
from keyquery.forms.measures import Measures, value_floor
from keyquery.support.checks import check_count


class Svd(NamedTuple):
    """M ≈ left · diag(values) · rightᵀ: a query along left[:, i] attends to a key along right[:, i]."""

    left: Float[Tensor, "*batch d k"]  # query directions, as columns
    values: Float[Tensor, "*batch k"]  # singular values, descending
    right: Float[Tensor, "*batch d k"]  # key directions, as columns

    def __repr__(self) -> str:
        return brief(self)


class Eigh(NamedTuple):
    """S ≈ vectors · diag(values) · vectorsᵀ: similar tokens attract (λ > 0) or repel (λ < 0)."""

    values: Float[Tensor, "*batch k"]  # eigenvalues, descending
    vectors: Float[Tensor, "*batch d k"]  # eigenvectors, as columns

    def __repr__(self) -> str:
        return brief(self)


class Planes(NamedTuple):
    """A ≈ Σ values·(source targetᵀ − target sourceᵀ): a query along `source` attends to a key along `target`."""

    values: Float[Tensor, "*batch k"]  # singular values of A, descending
    source: Float[Tensor, "*batch d k"]  # query direction of each plane, as columns
    target: Float[Tensor, "*batch d k"]  # key direction of each plane, as columns

    def __repr__(self) -> str:
        return brief(self)


class Directions(Measures):
    """Vectors of M, S and A, as columns, float64.

    They have derivatives for independent factors and distinct values; otherwise a derivative raises.
    """

    def svd(self, k: int | None = None) -> Svd:
        """The k leading singular triples (left, values, right) of M; all min(r, d, e) by default."""
        query, key, _, unit = balanced(*(refuse_nan(t, "singular triples") for t in self.wide()))
        most = min(*query.shape[-2:], key.shape[-1])
        check_count("k", k, 1, most, optional=True)
        left, values, right = product_svd(query.mT, key.mT, k or most)
        return Svd(left, restored(values, unit), right)

    @property
    def U(self) -> Float[Tensor, "*batch d m"]:
        """Left singular vectors of M = U·diag(S)·Vᵀ, as columns: `svd().left`, cached.

        `U`, `S` and `V` are those of an SVD, as in `torch.linalg.svd`; the symmetric part of M, S in the text of these
        pages, is `symmetric`.
        """
        return self._whole_svd().left

    @property
    def S(self) -> Float[Tensor, "*batch m"]:
        """Singular values of M, descending: `svd().values`, cached; not the symmetric part, which is `symmetric`."""
        return self._whole_svd().values

    @property
    def V(self) -> Float[Tensor, "*batch e m"]:
        """Right singular vectors of M, as columns: `svd().right`, cached."""
        return self._whole_svd().right

    def eigh(self, k: int | None = None) -> Eigh:
        """The k eigenpairs (values, vectors) of S of largest magnitude, by descending value; all by default."""
        self.require_square("a symmetric part")
        check_count("k", k, 1, min(2 * self.rank, self.dim), optional=True)
        core, basis = self._spanned("eigenvectors")
        values, vectors = torch.linalg.eigh(core.symmetric)
        largest = values.abs().argsort(dim=-1, descending=True)[..., :k]
        chosen = largest.gather(-1, values.gather(-1, largest).argsort(dim=-1, descending=True))
        columns = chosen.unsqueeze(-2).expand(*vectors.shape[:-1], -1)
        return Eigh(core.restored(values.gather(-1, chosen)), basis @ vectors.gather(-1, columns))

    def skew_planes(self, k: int | None = None) -> Planes:
        """The k leading rotation planes (values, source, target) of A; all min(2r, d) // 2 by default."""
        self.require_square("a skew part")
        most = min(2 * self.rank, self.dim) // 2
        check_count("k", k, 1, most, optional=True)
        k = k or most
        core, basis = self._spanned("planes")
        # i·A is Hermitian: a vector a + ib of eigenvalue μ > 0 has Aa = μb and Ab = −μa.
        values, vectors = torch.linalg.eigh(1j * core.skew)
        values, vectors = values.flip(-1)[..., :k].clamp(min=0), vectors.flip(-1)[..., :k]
        pairs = torch.stack((vectors.imag, vectors.real), dim=-1).flatten(-2)
        # Planes of value 0 are arbitrary: QR makes them orthogonal and leaves the others unchanged.
        frame, upper = torch.linalg.qr(pairs)
        frame = frame * torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
        frame = basis @ frame
        return Planes(core.restored(values), frame[..., 0::2], frame[..., 1::2])

    def _whole_svd(self) -> Svd:
        return self.cached("svd", self.svd)

    def _spanned(self, subject: str) -> tuple[Core, Tensor]:
        """A core of these factors, and the basis (..., d, n) of its coordinates."""
        query, key, lift, unit = balanced(*(refuse_nan(t, subject) for t in self.wide()))
        half = (query - key) / 2
        basis = span(query, half)
        return Core(query @ basis, half @ basis, lift, unit), basis

    def _positive_rows(self, rank: int | None = None) -> Tensor:
        """√λ·vᵀ of the leading positive eigenpairs of S; at least one row, zero where the batch has fewer."""
        values, vectors = self.eigh()
        core = self.core()
        kept = values > core.restored(value_floor(core)).unsqueeze(-1)
        most = max(int(kept.sum(-1).max()), 1)
        most = min(rank or most, most)
        return root_rows(values[..., :most], vectors[..., :most], kept[..., :most])


def root_rows(values: Tensor, vectors: Tensor, kept: Tensor) -> Tensor:
    """√|λ|·vᵀ of the eigenpairs that are kept, 0 for others."""
    size = torch.where(kept, torch.where(kept, values.abs(), 1.0).sqrt(), 0.0)
    return vectors.mT * size.unsqueeze(-1)
