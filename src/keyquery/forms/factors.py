"""The two factors of a bilinear form, and their algebra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.core import balance, weighted, widened
from keyquery.forms.derivatives import differentiated
from keyquery.forms.rope import Rope
from keyquery.support.checks import (
    broadcast,
    check_batches,
    check_count,
    check_dtype,
    check_float,
    check_number,
    check_range,
)

F = TypeVar("F", bound="Factors")
T = TypeVar("T")


class Factors:
    """Query (..., r, d) and key (..., r, e) of M = QᵀK; closed under sums, multiples, parts and changes of basis."""

    __array_ufunc__ = None  # numpy scalars defer multiplication to this class

    def __init__(self, query: Float[Tensor, "*#batch r d"], key: Float[Tensor, "*#batch r e"]) -> None:
        check_float("query", query, "... r d")
        check_float("key", key, "... r e", r=query.shape[-2])
        check_batches(query=query.shape[:-2], key=key.shape[:-2])
        if query.device != key.device:
            raise ValueError(f"query is on {query.device} and key on {key.device}: put them on one device")
        self._query, self._key = query, key  # not copied, so that in-place changes are noticed
        self._covariance: Tensor | None = None
        self._known: tuple[tuple[int, ...], dict[str, Any]] | None = None

    @classmethod
    def _trusted(cls: type[F], query: Tensor, key: Tensor, covariance: Tensor | None = None) -> F:
        form = cls.__new__(cls)
        form._query = query
        form._key = key
        form._covariance = covariance
        form._known = None
        return form

    # Properties

    @property
    def query(self) -> Float[Tensor, "*#batch r d"]:
        """The query factor Q (QΣ^½ for a form on data), in the form's dtype."""
        return (self._query if self._covariance is None else self.wide()[0]).to(self.dtype)

    @property
    def key(self) -> Float[Tensor, "*#batch r e"]:
        """The key factor K (KΣ^½ for a form on data), in the form's dtype."""
        return (self._key if self._covariance is None else self.wide()[1]).to(self.dtype)

    def wide(self) -> tuple[Tensor, Tensor]:
        """Query and key in float64."""
        return weighted(widened(self._query), widened(self._key), self._covariance)

    def cached(self, name: str, compute: Callable[[], T]) -> T:
        """What `compute` returns; kept until a factor is changed in place, unless derivatives are required."""
        tensors = [t for t in (self._query, self._key, self._covariance) if t is not None]
        if any(t.is_inference() or differentiated(t) for t in tensors):
            return compute()
        versions = tuple(t._version for t in tensors)
        if self._known is None or self._known[0] != versions:
            self._known = versions, {}
        known = self._known[1]
        if name not in known:
            known[name] = compute()
        result: T = known[name]
        return result

    @property
    def batch(self) -> torch.Size:
        """The leading dimensions: layers, heads."""
        return broadcast(self._query.shape[:-2], self._key.shape[:-2])

    @property
    def rank(self) -> int:
        """r, the rows of the factors: the largest rank that M can have."""
        return self._query.shape[-2]

    @property
    def dim(self) -> int:
        """d, the width of the space; of the queries' space, where keys have another."""
        return self._query.shape[-1]

    @property
    def key_dim(self) -> int:
        """e, the width of the keys' space: d, unless M is rectangular."""
        return self._key.shape[-1]

    def require_square(self, what: str) -> None:
        """Raise if queries and keys have different widths: M then has no trace, symmetric part or eigenvalues."""
        if self.dim != self.key_dim:
            raise ValueError(f"{what} needs queries and keys of one width, got {self.dim} and {self.key_dim}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the factors; the wider of the two."""
        return torch.promote_types(self._query.dtype, self._key.dtype)

    @property
    def device(self) -> torch.device:
        """The factors' device."""
        return self._query.device

    def dense(self) -> Float[Tensor, "*batch d e"]:
        """M itself, (..., d, e): for tests and small d."""
        query, key = (self.query, self.key) if self._covariance is None else self.wide()
        return (query.mT @ key).to(self.dtype)

    def to(self: F, target: torch.device | torch.dtype | str) -> F:
        """The form with its factors on another device or of another dtype."""
        query, key = (t.to(target) for t in (self._query, self._key))
        check_dtype("target", query.dtype)
        if torch.promote_types(self.dtype, query.dtype) != query.dtype:  # else every value fits
            check_range("the form", query, key)
        covariance = None if self._covariance is None else self._covariance.to(query.device)
        return self._trusted(query, key, covariance)

    def __add__(self: F, other: F) -> F:
        """The sum of two forms: their factors stacked, (..., r₁ + r₂, d)."""
        if not isinstance(other, Factors):
            return NotImplemented
        if (self.dim, self.key_dim) != (other.dim, other.key_dim):
            mine, its = (f.dim if f.dim == f.key_dim else f"{f.dim} × {f.key_dim}" for f in (self, other))
            raise ValueError(f"forms of width {mine} and {its} cannot be added")
        check_batches(left=self.batch, right=other.batch)
        if self._covariance is not other._covariance:
            return self._trusted(self.query, self.key) + self._trusted(other.query, other.key)
        stacked = (_stack(self._query, other._query), _stack(self._key, other._key))
        return self._trusted(*stacked, self._covariance)

    def __radd__(self: F, other: Any) -> F:
        """`sum` of a list of forms starts from 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __neg__(self: F) -> F:
        return self._with(-self._query, self._key)

    def __sub__(self: F, other: F) -> F:
        return self + (-other) if isinstance(other, Factors) else NotImplemented

    def __mul__(self: F, scale: float | Float[Tensor, "*#batch"]) -> F:
        """A multiple of the form; a tensor scales each form of the batch by its own number, and nothing elementwise."""
        if isinstance(scale, (Tensor, np.ndarray)):
            scale = torch.as_tensor(scale)
            if check_batches(scale=scale.shape, form=self.batch) != self.batch:
                shapes = f"batch {tuple(self.batch)}, not entries of M: got a scale of shape {tuple(scale.shape)}"
                raise ValueError(f"a tensor scales each form of the {shapes}")
            if scale.dtype.is_floating_point or scale.dtype.is_complex:  # integers are fine
                check_float("scale", scale, "...")
            scale = scale.to(self.dtype)[..., None, None]
        elif isinstance(scale, Real):
            check_number("scale", scale)
        else:
            return NotImplemented
        return self._product("a multiple of the form", self.query * scale, self._key)

    __rmul__ = __mul__

    def __truediv__(self: F, scale: float | Float[Tensor, "*#batch"]) -> F:
        return self * (1 / scale) if isinstance(scale, (Real, Tensor, np.ndarray)) else NotImplemented

    def __len__(self) -> int:
        if not self.batch:
            raise TypeError("this form has no batch")
        return self.batch[0]

    def __bool__(self) -> bool:
        return True

    def __iter__(self: F) -> Iterator[F]:
        """The forms of the first batch dimension."""
        return (self[i] for i in range(len(self)))  # type: ignore[index]

    @property
    def mT(self: F) -> F:
        """The transpose Mᵀ = KᵀQ: query and key are swapped."""
        return self._with(self._key, self._query)

    @property
    def symmetric(self: F) -> F:
        """S = (M + Mᵀ)/2 = PᵀP − NᵀN, of rank ≤ 2r: the symmetric part (similarity)."""
        self.require_square("a symmetric part")
        mean, half = self._halves()
        return self._with(torch.cat((mean, half), -2), torch.cat((mean, -half), -2))

    @property
    def skew(self: F) -> F:
        """A = (M − Mᵀ)/2 = NᵀP − PᵀN, of rank ≤ 2r: the skew part (direction)."""
        self.require_square("a skew part")
        mean, half = self._halves()
        return self._with(torch.cat((half, -mean), -2), torch.cat((mean, half), -2))

    def sum(self: F, dim: int = -1) -> F:
        """The sum over one dimension of the batch: M of all heads together, of rank ≤ heads·r.

        Queries that share their key are added, so that the rank grows by the number of keys only.
        """
        if not self.batch:
            raise ValueError("this form has no batch to sum over")
        check_count("dim", dim, -len(self.batch), len(self.batch) - 1)
        dim %= len(self.batch)
        whole = len(self.batch) + 2
        query, key = (t[(None,) * (whole - t.ndim)] for t in (self._query, self._key))
        if key.shape[dim] == 1:
            return self._product("the sum of queries", query.sum(dim), key.squeeze(dim))
        if query.shape[dim] == 1:
            return self._product("the sum of keys", query.squeeze(dim), key.sum(dim))
        return self._with(*(t.movedim(dim, -3).flatten(-3, -2) for t in (query, key)))

    def change_basis(self: F, basis: Float[Tensor, "*#batch d e"]) -> F:
        """BᵀMB: the form on coordinates c of x = Bc, e.g. B = diag(γ) for the gain of a norm."""
        self.require_square("a change of basis")
        check_float("basis", basis, "... d e", d=self.dim)
        check_batches(basis=basis.shape[:-2], form=self.batch)
        query, key = (factor @ basis.to(self.dtype) for factor in (self.query, self.key))
        check_range("the form in this basis", query, key)
        return self._trusted(query, key)

    def with_bias(
        self: F, query_bias: Float[Tensor, "*#batch r"] | None, key_bias: Float[Tensor, "*#batch r"] | None
    ) -> F:
        """[Q b_q]ᵀ[K b_k] in d + 1 dimensions: the form of q = Qx + b_q and k = Ky + b_k on tokens (x, 1), (y, 1)."""
        factors = []
        for name, factor, bias in (("query_bias", self.query, query_bias), ("key_bias", self.key, key_bias)):
            if bias is None:
                bias = factor.new_zeros(self.rank)
            check_float(name, bias, "... r", r=self.rank)
            batch = check_batches(form=factor.shape[:-2], **{name: bias.shape[:-1]})
            column = bias.to(self.dtype).unsqueeze(-1).expand(*batch, -1, -1)
            factors.append(torch.cat((factor.expand(*batch, -1, -1), column), dim=-1))
        check_range("the form with this bias", *factors)
        return self._trusted(*factors)

    def at(self: F, offset: float, rope: Rope) -> F:
        """M(Δ) = QᵀR(Δ)K under RoPE, Δ = key position − query position (−1: the token before)."""
        check_number("offset", offset)
        if not isinstance(rope, Rope):
            raise TypeError(f"rope must be a Rope, got {type(rope).__name__}")
        query, key = rope.rotate(self._query.mT, 0.0).mT, rope.rotate(self._key.mT, offset).mT
        return self._product("the rotated form", query, key)

    def _product(self: F, subject: str, query: Tensor, key: Tensor) -> F:
        check_range(subject, query, key)
        return self._with(query, key)

    def _with(self: F, query: Tensor, key: Tensor) -> F:
        return self._trusted(query, key, self._covariance)

    def __getstate__(self) -> dict[str, Any]:
        """Without the cached core: the version counters of copied tensors restart, so it could be stale."""
        return {**self.__dict__, "_known": None}

    def _halves(self) -> tuple[Tensor, Tensor]:
        """P = (Q + K)/2 and N = (Q − K)/2, of balanced rows."""
        query, key = balance(self._query.to(self.dtype), self._key.to(self.dtype))
        return query / 2 + key / 2, query / 2 - key / 2


def _stack(first: Tensor, second: Tensor) -> Tensor:
    """Rows of both factors, (..., r₁ + r₂, d), leading dimensions broadcast."""
    batch = broadcast(first.shape[:-2], second.shape[:-2])
    dtype = torch.promote_types(first.dtype, second.dtype)
    return torch.cat([t.to(dtype).expand(*batch, *t.shape[-2:]) for t in (first, second)], dim=-2)
