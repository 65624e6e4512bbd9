"""The directions of a form: singular vectors, object directions (of S) and relation planes (of A)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.checks import check_count
from keyquery.forms.core import Core, balance, product_svd, span
from keyquery.forms.measures import Measures, value_floor


class Svd(NamedTuple):
    """M ≈ left · diag(values) · rightᵀ: a query along left[:, i] looks at a key along right[:, i]."""

    left: Float[Tensor, "*batch d k"]
    values: Float[Tensor, "*batch k"]
    right: Float[Tensor, "*batch d k"]


class Eigh(NamedTuple):
    """S ≈ vectors · diag(values) · vectorsᵀ: object directions; what is alike attracts (λ > 0) or repels (λ < 0)."""

    values: Float[Tensor, "*batch k"]
    vectors: Float[Tensor, "*batch d k"]


class Planes(NamedTuple):
    """A ≈ Σ values·(source targetᵀ − target sourceᵀ): a query along `source` points at a key along `target`."""

    values: Float[Tensor, "*batch k"]
    source: Float[Tensor, "*batch d k"]
    target: Float[Tensor, "*batch d k"]


class Directions(Measures):
    """Vectors of M, S and A, as columns, float64.

    They have derivatives where torch's own have: independent factors and distinct values.
    """

    def svd(self, k: int | None = None) -> Svd:
        """The k leading singular triples (left, values, right) of M; all min(r, d) by default.

        >>> left, values, right = kq.Form(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2)).svd(1)
        >>> left.abs(), values
        (tensor([[1.], [0.]], dtype=torch.float64), tensor([3.], dtype=torch.float64))
        """
        query, key = torch.broadcast_tensors(*self.wide())
        most = min(query.shape[-2:])
        check_count("k", k, 1, most, optional=True)
        return Svd(*product_svd(query.mT, key.mT, k or most))

    def eigh(self, k: int | None = None) -> Eigh:
        """The k eigenpairs (values, vectors) of S of largest magnitude, by descending value; all by default.

        >>> kq.Form(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])).eigh(1).values
        tensor([1.], dtype=torch.float64)
        """
        core, basis = self._core_and_basis()
        check_count("k", k, 1, basis.shape[-1], optional=True)
        values, vectors = torch.linalg.eigh(core.symmetric)
        largest = values.abs().argsort(dim=-1, descending=True)[..., :k]
        chosen = largest.gather(-1, values.gather(-1, largest).argsort(dim=-1, descending=True))
        columns = chosen.unsqueeze(-2).expand(*vectors.shape[:-1], -1)
        return Eigh(values.gather(-1, chosen), basis @ vectors.gather(-1, columns))

    def skew_planes(self, k: int | None = None) -> Planes:
        """The k leading rotation planes (values, source, target) of A; all min(2r, d) // 2 by default.

        >>> kq.Form(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])).skew_planes(1).values
        tensor([0.5000], dtype=torch.float64)
        """
        core, basis = self._core_and_basis()
        most = basis.shape[-1] // 2
        check_count("k", k, 1, most, optional=True)
        k = k or most
        # i·A is Hermitian: a vector a + ib of eigenvalue μ > 0 has Aa = μb and Ab = −μa.
        values, vectors = torch.linalg.eigh(1j * core.skew)
        values, vectors = values.flip(-1)[..., :k].clamp(min=0), vectors.flip(-1)[..., :k]
        pairs = torch.stack((vectors.imag, vectors.real), dim=-1).flatten(-2)
        # Planes of value 0 come out in any position: QR makes them orthogonal and leaves the others as they are.
        frame, upper = torch.linalg.qr(pairs)
        frame = frame * torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
        frame = basis @ frame
        return Planes(values, frame[..., 0::2], frame[..., 1::2])

    def _core_and_basis(self) -> tuple[Core, Tensor]:
        query, key, scale = balance(*self.wide())
        half = (query - key) / 2
        basis = span(query, half)
        return Core(query @ basis, half @ basis, scale), basis

    def _positive_rows(self, rank: int | None = None) -> Tensor:
        """√λ·vᵀ of the leading positive eigenpairs of S; at least one row, zero where the batch has fewer."""
        values, vectors = self.eigh()
        positive = values > value_floor(self.core()).unsqueeze(-1)
        most = max(int(positive.sum(-1).max()), 1)
        kept = slice(min(rank or most, most))
        return vectors[..., kept].mT * values[..., kept].clamp(min=0).sqrt().unsqueeze(-1)
