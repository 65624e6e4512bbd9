"""Metrics of a form: norms, spectra and ranks, from its float64 core."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from keyquery.forms.core import Core, balanced, inner, reduced, restored, row_exponents, times
from keyquery.forms.derivatives import differentiated, refuse_nan
from keyquery.forms.display import brief
from keyquery.forms.factors import Factors
from keyquery.support.checks import broadcast, check_choice

# Zero tolerances: of a form relative to its factors, of an eigenvalue relative to its form.
ZERO_FORM = 1e-14
ZERO_VALUE = 1e-12
BLOCK = 32  # columns of a factor that are multiplied at a time, to save memory


class Signature(NamedTuple):
    """Numbers of positive, negative and zero eigenvalues of the symmetric part; they sum to d."""

    positive: Int[Tensor, "*batch"]  # eigenvalues above 0
    negative: Int[Tensor, "*batch"]  # eigenvalues below 0
    zero: Int[Tensor, "*batch"]  # the others

    def __repr__(self) -> str:
        return brief(self)


class Measures(Factors):
    """Norms and spectra of M = QᵀK = S + A. Metrics are float64, one per form of the batch."""

    def core(self) -> Core:
        """The form in the at most 2r dimensions that it acts on; cached until a factor is changed in place."""
        return self.cached("core", self._core)

    def _core(self) -> Core:
        if self.dim == self.key_dim:
            return reduced(self._query, self._key, self._covariance)
        # A rectangular M is the block of a square matrix, 0 elsewhere, which has its norms and singular values.
        return reduced(pad(self._query, (0, self.key_dim)), pad(self._key, (self.dim, 0)))

    @property
    def norm2(self) -> Float[Tensor, "*batch"]:
        """‖M‖² = ‖S‖² + ‖A‖²."""
        symmetric, skew = self.core().energies
        return symmetric + skew

    def norm(self) -> Float[Tensor, "*batch"]:
        """‖M‖, the Frobenius norm."""
        core = self.core()
        symmetric, skew = core.squares
        return core.restored((symmetric + skew).sqrt())

    @property
    def symmetry(self) -> Float[Tensor, "*batch"]:
        """tr(M²)/‖M‖² = (‖S‖² − ‖A‖²)/‖M‖² ∈ [−1, 1]: 1 symmetric, 0 as at random, −1 skew; 0 for a zero form."""
        self.require_square("a symmetry")
        core = self.core()
        symmetric, skew = core.squares
        return _ratio(symmetric - skew, symmetric + skew, is_zero(core))

    def trace(self) -> Float[Tensor, "*batch"]:
        """tr M = Σ Q∘K."""
        self.require_square("a trace")
        query, key = self.wide()
        return (query * key).sum((-2, -1))

    def symmetric_eigenvalues(self) -> Float[Tensor, "*batch n"]:
        """The n = min(2r, d) eigenvalues of S = (M + Mᵀ)/2 that can be non-zero, descending; `eigvals` are those of
        M.
        """
        self.require_square("a symmetric part")
        core = self.core()
        return core.restored(core.eigenvalues)

    def eigvals(self) -> Complex[Tensor, "*batch m"]:
        """The m = min(r, d) complex eigenvalues of M that can be non-zero, by descending magnitude.

        Those of QᵀK and of the r×r matrix KQᵀ are the same, but for zeros.
        """
        self.require_square("an eigenvalue")
        query, key, _, unit = balanced(*(refuse_nan(t, "eigenvalues of M") for t in self.wide()))
        narrow = query.shape[-2] <= query.shape[-1]
        values = restored(torch.linalg.eigvals(key @ query.mT if narrow else query.mT @ key), unit)
        return values.gather(-1, values.detach().abs().argsort(dim=-1, descending=True))

    def skew_values(self) -> Float[Tensor, "*batch n"]:
        """The n = min(2r, d) singular values of A that can be non-zero, descending: equal pairs, an odd last one 0."""
        self.require_square("a skew part")
        core = self.core()
        return core.restored(core.skew_values)

    def singular_values(self) -> Float[Tensor, "*batch m"]:
        """The m = min(r, d, e) singular values of M that can be non-zero, descending."""
        core = self.core()
        return core.restored(core.singular_values[..., : min(self.dim, self.key_dim)])

    def signature(self) -> Signature:
        """Counts of positive, negative and zero eigenvalues of S, up to 1e-12·‖M‖; (0, 0, d) for a zero form."""
        self.require_square("a signature")
        core = self.core()
        values, floor = core.eigenvalues, value_floor(core).unsqueeze(-1)
        positive, negative = (values > floor).sum(-1), (values < -floor).sum(-1)
        return Signature(positive, negative, self.dim - positive - negative)

    @property
    def positive_share(self) -> Float[Tensor, "*batch"]:
        """Σ λ₊² / Σ λ² over the eigenvalues of S: 1 for a PSD form, 0 where S is zero."""
        self.require_square("a symmetric part")
        core = self.core()
        energy = core.eigenvalues.square().sum(-1)
        positive = core.eigenvalues.clamp(min=0).square().sum(-1)
        return _ratio(positive, energy, energy.sqrt() <= value_floor(core))

    def effective_rank(self) -> Float[Tensor, "*batch"]:
        """exp(−Σ p ln p), p = σ/Σσ over the singular values of M; 0 for a zero form."""
        core = self.core()
        return entropy_rank(core.singular_values, is_zero(core))

    def stable_rank(self) -> Float[Tensor, "*batch"]:
        """‖M‖²/σ₁²; 0 for a zero form."""
        core = self.core()
        energy = core.singular_values.square()
        return _ratio(energy.sum(-1), energy[..., 0], is_zero(core))

    def row_norms(self) -> Float[Tensor, "*batch d"]:
        """L2 norms of the rows of M, one per coordinate of the query."""
        return self._lengths(self.wide()[0], self.core().key, 1)

    def column_norms(self) -> Float[Tensor, "*batch d"]:
        """L2 norms of the columns of M, one per coordinate of the key."""
        return self._lengths(self.wide()[1], self.core().own_query, -1)

    def column_directionality(self, gamma: float = 2.0, kind: str = "excess") -> Float[Tensor, "*batch"]:
        """(r − c)/(r + c) ∈ [−1, 1] over outlier rows and columns; negative if columns dominate.

        A row or column is an outlier if its norm exceeds mean + gamma·std (ddof 1) of its kind. `"excess"` sums what
        is above that threshold, `"norms"` the whole norms. 0 without outliers.
        """
        values = column_directionality(self.row_norms(), self.column_norms(), gamma, kind)
        return torch.where(is_zero(self.core()), 0.0, values)

    def _lengths(self, factor: Tensor, other: Tensor, sign: int) -> Tensor:
        """Norms of M·x for the columns x of a factor, from the other side of the core."""
        core = self.core()
        exponents = sign * core.lift - core.unit
        if self._covariance is not None or self.dtype == torch.float64:
            # Squares may be out of range: the rows of the factor, which may be shared, become about 1.
            size = row_exponents(factor)
            factor, exponents = times(factor, -size), exponents + size
        return core.restored(_column_lengths(factor, times(other, exponents)))


def column_directionality(
    rows: Float[Tensor, "*batch d"], columns: Float[Tensor, "*batch d"], gamma: float = 2.0, kind: str = "excess"
) -> Float[Tensor, "*batch"]:
    """The column directionality of a matrix whose row and column norms are known."""
    check_choice("kind", kind, ("excess", "norms"))
    size = torch.maximum(row_exponents(rows), row_exponents(columns))  # squares of norms would overflow
    row, column = (_outstanding(times(norms, -size), gamma, kind) for norms in (rows, columns))
    return _ratio(row - column, row + column, row + column == 0)


def entropy_rank(values: Float[Tensor, "*batch n"], zero: Bool[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """exp(−Σ p ln p), p = v/Σv over values ≥ 0: their effective number; 0 where `zero`."""
    share = _ratio(values, values.sum(-1, keepdim=True), zero.unsqueeze(-1))
    # A share of 0 adds nothing, but its logarithm would make the gradient NaN.
    entropy = -(share * torch.where(share > 0, share, 1.0).log()).sum(-1)
    return torch.where(zero, 0.0, entropy.exp())


def is_zero(core: Core) -> Tensor:
    """Whether a form is zero up to the rounding of its factors."""
    norm, factors = core.size
    return norm <= ZERO_FORM * factors


def value_floor(core: Core) -> Tensor:
    """Below this an eigenvalue of S is zero."""
    norm, factors = core.size
    return torch.maximum(ZERO_VALUE * norm, ZERO_FORM * factors)


def _column_lengths(factor: Tensor, other: Tensor) -> Tensor:
    """‖otherᵀ·x‖ for every column x of a factor (..., r, d); a factor may be shared by several others, as under GQA."""
    if differentiated(factor, other):
        return torch.linalg.vector_norm(factor.mT @ other, dim=-1, dtype=torch.float64)
    squares = factor.new_zeros(*broadcast(factor.shape[:-2], other.shape[:-2]), factor.shape[-1], dtype=torch.float64)
    for block in other.split(BLOCK, -1):
        squares += inner(block.mT, factor.mT).square().sum(-2, dtype=torch.float64)
    return squares.sqrt_()


def _ratio(above: Tensor, below: Tensor, zero: Tensor) -> Tensor:
    """above / below, and 0 with a zero gradient where `zero`."""
    return torch.where(zero, 0.0, above / torch.where(zero, 1.0, below))


def _outstanding(norms: Tensor, gamma: float, kind: str) -> Tensor:
    spread = norms.std(-1, keepdim=True) if norms.shape[-1] > 1 else torch.zeros_like(norms)
    excess = norms - norms.mean(-1, keepdim=True) - gamma * spread
    # Equal norms differ by rounding, which must not produce outliers.
    stands_out = excess > ZERO_VALUE * norms.amax(-1, keepdim=True)
    return torch.where(stands_out, excess if kind == "excess" else norms, 0.0).sum(-1)
