"""Asymmetric kernel SVD (KSVD) of K = Φ_qΦ_kᵀ, without forming K, and its primal weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.core import product_svd
from keyquery.forms.display import brief
from keyquery.support.checks import check_count, check_float


class Primal(NamedTuple):
    """Projection weights: e = Φ_q·we and r = Φ_k·wr."""

    we: Float[Tensor, "p s"]
    wr: Float[Tensor, "p s"]

    def __repr__(self) -> str:
        return brief(self)


class Extended(NamedTuple):
    """Singular vectors at new points; None for a side without new points."""

    left: Float[Tensor, "n s"] | None
    right: Float[Tensor, "m s"] | None

    def __repr__(self) -> str:
        return brief(self)


@dataclass(frozen=True, eq=False)
class Ksvd:
    """K ≈ left · diag(values) · rightᵀ with K = Φ_qΦ_kᵀ: K·right = left·Σ and Kᵀ·left = right·Σ."""

    left: Float[Tensor, "n s"]  # left singular vectors, as columns
    values: Float[Tensor, " s"]  # singular values, descending
    right: Float[Tensor, "m s"]  # right singular vectors, as columns
    phi_query: Float[Tensor, "n p"]  # features of the queries
    phi_key: Float[Tensor, "m p"]  # features of the keys

    __repr__ = brief

    def primal(self) -> Primal:
        """We = Φ_kᵀ·right and Wr = Φ_qᵀ·left, (p, s) each, so that e = Φ_q·We = left·Σ and r = Φ_k·Wr = right·Σ."""
        present = self._inverse_values() > 0
        return Primal(self.phi_key.mT @ self.right * present, self.phi_query.mT @ self.left * present)

    def objective(
        self, we: Float[Tensor, "p s"] | None = None, wr: Float[Tensor, "p s"] | None = None
    ) -> Float[Tensor, ""]:
        """J = ½Σ eᵢᵀΛeᵢ + ½Σ rⱼᵀΛrⱼ − tr(WeᵀWr), Λ = Σ⁻¹. Default weights: the solution, where J = 0.

        The converse does not hold: J is zero at many points that are not stationary; `residual` distinguishes them.
        """
        we, wr = self._weights(we, wr)
        e, r = self.phi_query @ we, self.phi_key @ wr
        energy = ((e.square().sum(0) + r.square().sum(0)) * self._inverse_values()).sum() / 2
        return energy - (we * wr).sum()

    def residual(
        self, we: Float[Tensor, "p s"] | None = None, wr: Float[Tensor, "p s"] | None = None
    ) -> Float[Tensor, ""]:
        """Relative KKT residual ‖(∂J/∂We, ∂J/∂Wr)‖/‖(Wr, We)‖: 0 at a stationary point of J and only there.

        ∂J/∂We = Φ_qᵀeΛ − Wr and ∂J/∂Wr = Φ_kᵀrΛ − We. Rounding adds about 1e-16·σ₁/σₛ, since Λ divides by σ.
        """
        we, wr = self._weights(we, wr)
        inverse = self._inverse_values()
        for_we = self.phi_query.mT @ (self.phi_query @ we * inverse) - wr
        for_wr = self.phi_key.mT @ (self.phi_key @ wr * inverse) - we
        size = torch.hypot(we.norm(), wr.norm())
        return torch.hypot(for_we.norm(), for_wr.norm()) / torch.where(size > 0, size, 1.0)

    def extend(
        self, phi_query: Float[Tensor, "a p"] | None = None, phi_key: Float[Tensor, "b p"] | None = None
    ) -> Extended:
        """Singular vectors at new points: left = Φ_q·We·Λ and right = Φ_k·Wr·Λ."""
        features = self.phi_query.shape[-1]
        we, wr = self.primal()
        left = right = None
        if phi_query is not None:
            check_float("phi_query", phi_query, "n p", p=features)
            left = phi_query.double() @ we * self._inverse_values()
        if phi_key is not None:
            check_float("phi_key", phi_key, "m p", p=features)
            right = phi_key.double() @ wr * self._inverse_values()
        return Extended(left, right)

    def _weights(self, we: Tensor | None, wr: Tensor | None) -> Primal:
        solution = self.primal()
        we, wr = solution.we if we is None else we, solution.wr if wr is None else wr
        features, rank = solution.we.shape
        check_float("we", we, "p s", p=features, s=rank)
        check_float("wr", wr, "p s", p=features, s=rank)
        return Primal(we.double(), wr.double())

    def _inverse_values(self) -> Tensor:
        """Λ = Σ⁻¹, with 0 for zero singular values."""
        present = self.values > 1e-12 * self.values.max()
        return torch.where(present, 1 / torch.where(present, self.values, 1.0), 0.0)


def ksvd(phi_query: Float[Tensor, "n p"], phi_key: Float[Tensor, "m p"], rank: int) -> Ksvd:
    """Asymmetric kernel SVD: leading singular triples of K = Φ_qΦ_kᵀ, in O((n + m)p²), without the n×m matrix.

        K·right = left·Σ,   Kᵀ·left = right·Σ

    Parameters
    ----------
    phi_query, phi_key
        Features Φ_q (n, p) of the queries and Φ_k (m, p) of the keys.
    rank
        Number of triples, at most min(n, m, p).

    Returns
    -------
    Ksvd
        With `left`, `values` and `right` in float64, and the primal weights by `primal()`.

    See Also
    --------
    nystrom : an approximation from a sample of points.

    Examples
    --------
    >>> kq.ksvd(torch.eye(3), torch.diag(torch.tensor([1.0, 3.0, 2.0])), rank=2).values
    tensor([3., 2.], dtype=torch.float64)
    """
    check_float("phi_query", phi_query, "n p")
    check_float("phi_key", phi_key, "m p", p=phi_query.shape[-1])
    check_count("rank", rank, 1, min(*phi_query.shape, len(phi_key)))
    left, values, right = product_svd(phi_query, phi_key, rank)
    return Ksvd(left, values, right, phi_query.double(), phi_key.double())


def nystrom(phi_query: Float[Tensor, "n p"], phi_key: Float[Tensor, "m p"], rank: int, samples: int) -> Ksvd:
    """Nyström approximation of the KSVD, from evenly spaced queries and keys s, extended to all points.

        left·diag(values)·rightᵀ = K[:, s]·B⁺·K[s, :],   B the leading triples of K[s, s]

    It is exact if B has the rank of K. Vectors are scaled so that `values` estimate those of K; they are orthogonal on
    the sample, not on all points.

    Parameters
    ----------
    phi_query, phi_key
        Features (n, p) of the queries and (m, p) of the keys.
    rank
        Number of triples, at most min(samples, p).
    samples
        Number of queries and of keys in the sample.

    Returns
    -------
    Ksvd
        The approximate triples.

    See Also
    --------
    ksvd : the exact decomposition.

    Examples
    --------
    >>> phi = torch.linspace(0.1, 1, 10)[:, None] ** torch.arange(3)
    >>> solution = kq.nystrom(phi, phi, rank=3, samples=5)
    >>> torch.allclose(solution.left * solution.values @ solution.right.mT, (phi @ phi.mT).double(), atol=1e-5)
    True
    """
    check_float("phi_query", phi_query, "n p")
    check_float("phi_key", phi_key, "m p", p=phi_query.shape[-1])
    check_count("samples", samples, 1, min(len(phi_query), len(phi_key)))
    check_count("rank", rank, 1, min(samples, phi_query.shape[-1]))
    some_query, some_key = (_evenly(phi, samples) for phi in (phi_query, phi_key))
    sample = ksvd(some_query, some_key, rank)
    left, right = sample.extend(phi_query, phi_key)
    assert left is not None
    assert right is not None
    shrink_left, shrink_right = ((samples / len(phi)) ** 0.5 for phi in (phi_query, phi_key))
    values = sample.values / (shrink_left * shrink_right)
    return Ksvd(left * shrink_left, values, right * shrink_right, phi_query.double(), phi_key.double())


def _evenly(points: Tensor, samples: int) -> Tensor:
    return points[torch.linspace(0, len(points) - 1, samples, dtype=torch.float64).long()]
