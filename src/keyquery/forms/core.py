"""The float64 core: a form of any width d, reduced to the at most 2r dimensions that it acts on.

Every norm and spectrum of M = QᵀK is unchanged by an orthogonal change of basis, so it is enough to know the rows of
Q and K in an orthonormal basis of their span. There are two methods:

* the Cholesky factor of the Gram matrix of [Q; K], scaled to unit diagonal. Fast, needs no basis, and shares the key
  block under GQA. Its error is that of the Gram matrix times the norm of the inverse factor.
* thin QR of [Q; N], N = (Q − K)/2, for the forms of a batch where that norm is large: tied, nearly tied, parallel,
  repeated or zero rows. Stable column by column, so a small difference of query and key keeps all of its digits.

Rows are first scaled to size 1 by powers of two, which is exact, and then each pair of rows to equal length, so that no
norm or spectrum over- or underflows, whatever the size of the factors: qᵀk = (cq)ᵀ(k/c) for each pair of rows and any
c, and sums and differences of q and k are only as exact as the longer of the two. Tied rows are unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from keyquery.forms.derivatives import differentiated, first_order
from keyquery.support.checks import broadcast

# Largest norm of the inverse Cholesky factor at which the Gram matrix is trusted: eleven digits are left. Where N is
# small against Q, the inverse must be smaller by as much, for the digits to be those of N.
TRUSTED_INVERSE = 1e5


@dataclass(frozen=True, eq=False)
class Core:
    """A form in n = min(2r, d) dimensions: query rows Q and half differences N = (Q − K)/2, float64.

    N is kept rather than K because the skew part is a product with N: where query and key are tied it is exactly
    zero. If n = 2r, Q is in the first r coordinates only. Rows are balanced and about 1 in size: Q is the query
    times 2^(lift − unit), K the key times 2^(−lift − unit). All matrices and spectra here are therefore those of
    M / 4^unit; `restored` takes them back. `independent` rows have no small differences to protect: both parts then
    come from M itself.
    """

    query: Float[Tensor, "*batch r n"]
    half: Float[Tensor, "*batch r n"]
    lift: Float[Tensor, "*batch r 1"]
    unit: Float[Tensor, "*batch 1 1"]
    independent: bool = False

    def restored(self, values: Tensor) -> Tensor:
        """Values (*batch) or (*batch, n) in units of M itself; beyond the range of float64 they are 0 or infinite."""
        return restored(values, self.unit)

    @cached_property
    def key(self) -> Tensor:
        """K = Q − 2N."""
        return self.query - 2 * self.half

    @property
    def own_query(self) -> Tensor:
        """Q in the coordinates that it has: (..., r, r) if n = 2r."""
        rank, width = self.query.shape[-2:]
        return self.query[..., : rank if width == 2 * rank else width]

    @cached_property
    def symmetric(self) -> Tensor:
        """S = PᵀP − NᵀN, P = Q − N, as an n×n matrix."""
        if self.independent:
            return (self._square + self._square.mT) / 2
        mean = self.query - self.half
        return mean.mT @ mean - self.half.mT @ self.half

    @cached_property
    def skew(self) -> Tensor:
        """A = NᵀP − PᵀN, as an n×n matrix."""
        if self.independent:
            return (self._square - self._square.mT) / 2
        cross = self.half.mT @ (self.query - self.half)
        return cross - cross.mT

    @cached_property
    def matrix(self) -> Tensor:
        """The rows of M that can be non-zero: r × n if n = 2r, else n × n."""
        return self.own_query.mT @ self.key

    @property
    def _square(self) -> Tensor:
        """M, n × n."""
        return pad(self.matrix, (0, 0, 0, self.key.shape[-1] - self.matrix.shape[-2]))

    @property
    def energies(self) -> tuple[Tensor, Tensor]:
        """(‖S‖², ‖A‖²) of the form itself."""
        symmetric, skew = (self.restored(self.restored(square)) for square in self.squares)
        return symmetric, skew

    @cached_property
    def squares(self) -> tuple[Tensor, Tensor]:
        """(‖S‖², ‖A‖²) in the units of the core."""
        return self.symmetric.square().sum((-2, -1)), self.skew.square().sum((-2, -1))

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of S, descending."""
        return self._spectra[0]

    @cached_property
    def skew_values(self) -> Tensor:
        """Singular values of A, descending."""
        return self._spectra[1]

    @cached_property
    def _spectra(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of S and singular values of A: both at once on a GPU."""
        if not _many_on_gpu(self.symmetric):
            return eigenvalues(self.symmetric).flip(-1), singular_values(self.skew)
        both = torch.stack((self.symmetric, self.skew))
        values = eigenvalues(both, both.new_tensor([1.0, -1.0]).view(2, *[1] * (both.ndim - 3)))
        return values[0].flip(-1), values[1].abs().sort(descending=True).values

    @cached_property
    def singular_values(self) -> Tensor:
        """The min(r, n) singular values of M that can be non-zero, descending."""
        return singular_values(self.matrix)[..., : min(self.query.shape[-2:])]

    @cached_property
    def size(self) -> tuple[Tensor, Tensor]:
        """‖M‖, and ‖Q‖‖K‖, against which rounding is measured; no derivatives."""
        symmetric, skew = self.squares
        factors = torch.linalg.matrix_norm(self.query) * torch.linalg.matrix_norm(self.key)
        return (symmetric + skew).detach().sqrt(), factors.detach()


def restored(values: Tensor, unit: Float[Tensor, "*batch 1 1"]) -> Tensor:
    """Values (*batch) or (*batch, n) of M/4^unit in units of M itself."""
    power = unit.exp2().reshape(unit.shape[:-2] + (1,) * (values.ndim - unit.ndim + 2))
    return values * power * power


def reduced(query: Tensor, key: Tensor, covariance: Tensor | None = None) -> Core:
    """Reduce the form of two factors, optionally as it acts on data of a given covariance, to its Core."""
    rank, dim = query.shape[-2:]
    (query, size_query), (key, size_key) = _in_range(query), _in_range(key)
    if covariance is not None:
        covariance, size = halved(covariance.double())
        size_query, size_key = size_query + size, size_key + size
    if 2 * rank > dim:
        return _paired(*weighted(query, key, covariance), size_query, size_key)
    fast, trusted = _by_cholesky(query, key, covariance, size_query, size_key)
    if trusted.all():
        return fast
    chosen = (t.expand(*trusted.shape, *t.shape[-2:])[~trusted] for t in (query, key, size_query, size_key))
    query, key, size_query, size_key = chosen
    slow = _by_qr(*weighted(query, key, covariance), size_query, size_key)
    parts = zip(*((c.query, c.half, c.lift, c.unit) for c in (fast, slow)), strict=True)
    if not trusted.ndim:
        return Core(*(part.squeeze(0) for _, part in parts))
    rows = (~trusted).flatten().nonzero().squeeze(-1)
    return Core(*(whole.flatten(0, -3).index_copy(0, rows, part).view_as(whole) for whole, part in parts))


def widened(tensor: Tensor) -> Tensor:
    """In float64; half precision by way of float32, which torch converts several times faster."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).double()


def _in_range(factor: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, with rows scaled so that squares do not overflow, and the exponents of their divisors."""
    wide = widened(factor)
    if factor.dtype != torch.float64:  # squares of lower precisions always fit
        return wide, wide.new_zeros(*wide.shape[:-1], 1)
    size = row_exponents(wide)
    return wide * (-size).exp2(), size


def span(*factors: Tensor) -> Tensor:
    """An orthonormal basis (..., d, min(rows, d)) of the span of all rows, the first factor's directions first."""
    return torch.linalg.qr(torch.cat(factors, dim=-2).mT).Q


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values (..., min(m, n)), descending: twice as fast as an SVD where none of them is small.

    The eigenvalues of MMᵀ are σ², with an error of 1e-16·σ₁²: σ itself is then off by 1e-16·σ₁²/2σ, which is below
    1e-11·σ₁ unless σ < 1e-5·σ₁. Where one is, an SVD is taken.
    """
    squares = eigenvalues(matrix @ matrix.mT).flip(-1)[..., : min(matrix.shape[-2:])]
    safe = squares[..., -1] > 1e-10 * squares[..., 0]
    if safe.all():
        return squares.sqrt()
    values = torch.where(safe.unsqueeze(-1), squares, 1.0).sqrt()
    return values.masked_scatter(~safe.unsqueeze(-1), torch.linalg.svdvals(matrix[~safe].cpu()).to(values))


def eigenvalues(matrix: Tensor, sign: Tensor | None = None) -> Tensor:
    """Eigenvalues (..., n) of symmetric matrices, ascending.

    On a GPU, where `sign` is −1, those of −i times a skew matrix.
    """
    if not _many_on_gpu(matrix):
        return torch.linalg.eigvalsh(matrix)
    from keyquery.forms.eigenvalues_gpu import eigenvalues as fast  # imports triton, an optional dependency

    signs = None if sign is None else sign.expand(matrix.shape[:-2]).reshape(-1)
    return fast(matrix.flatten(0, -3), signs).reshape(matrix.shape[:-1])


def _many_on_gpu(matrix: Tensor) -> bool:
    """Whether these are matrices of a size, and of so many, that one program each is fastest."""
    count, size = math.prod(matrix.shape[:-2]), matrix.shape[-1]
    able = matrix.is_cuda and matrix.dtype == torch.float64 and not differentiated(matrix)
    return able and matrix.ndim > 2 and count >= 8 and 32 <= size <= 512 and find_spec("triton") is not None


def weighted(query: Tensor, key: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor]:
    """QΣ^½ and KΣ^½: the factors as they act on data of covariance Σ."""
    if covariance is None:
        return query, key
    root = square_root(covariance)
    return query @ root, key @ root


def square_root(covariance: Tensor) -> Tensor:
    """Σ^½, symmetric, of a positive semi-definite matrix; eigenvalues that are rounding count as zero."""
    values, vectors = torch.linalg.eigh(covariance.double())
    floor = len(values) * torch.finfo(values.dtype).eps * values.detach().max()
    values = torch.where(values > floor, values, 0.0)
    # The root of 0 has no derivative: it is kept away from autograd.
    roots = torch.where(values > 0, torch.where(values > 0, values, 1.0).sqrt(), 0.0)
    return (vectors * roots) @ vectors.mT


def product_svd(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Leading singular triples of left @ rightᵀ, (..., m, p) and (..., n, p), without forming the m×n matrix."""
    q_left, r_left = torch.linalg.qr(left.double())
    q_right, r_right = torch.linalg.qr(right.double())
    u, values, vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    return q_left @ u[..., :rank], values[..., :rank], q_right @ vh[..., :rank, :].mT


def _paired(query: Tensor, key: Tensor, size_query: Tensor, size_key: Tensor, independent: bool = False) -> Core:
    """The core of rows that are the factors' rows divided by 2^size."""
    query, key, lift, unit = balanced(query, key, size_query, size_key)
    return Core(query, (query - key) / 2, lift, unit, independent)


def _by_qr(query: Tensor, key: Tensor, size_query: Tensor, size_key: Tensor) -> Core:
    wide = _paired(query, key, size_query, size_key)
    # The basis is a constant to autograd. Norms and spectra do not change when it turns within the span, nor, to
    # first order, when it leaves it: first derivatives are exact, also where rows are dependent and QR has none.
    basis = span(wide.query.detach(), wide.half.detach())
    query, half = (first_order(t) @ basis for t in (wide.query, wide.half))
    return Core(query, half, wide.lift, wide.unit)


def _by_cholesky(
    query: Tensor, key: Tensor, covariance: Tensor | None, size_query: Tensor, size_key: Tensor
) -> tuple[Core, Tensor]:
    """Coordinates from the Gram matrix of [Q; K], and which forms of the batch keep enough digits by it."""
    gram = _gram(query, key, covariance)
    square = gram.diagonal(dim1=-2, dim2=-1)
    size = torch.where(square > 0, square, 1.0).sqrt()
    unit = gram / (size.unsqueeze(-1) * size.unsqueeze(-2))
    factor, failed = torch.linalg.cholesky_ex(unit)
    eye = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)
    inverse = torch.linalg.matrix_norm(torch.linalg.solve_triangular(factor.detach(), eye, upper=False))
    trusted = (failed == 0) & (inverse <= TRUSTED_INVERSE)
    if not trusted.all():
        # Untrusted forms are replaced later; until then they must not make the gradients of others NaN.
        factor = torch.linalg.cholesky(torch.where(trusted[..., None, None], unit, eye))
    rows = factor * size.unsqueeze(-1)
    rank = query.shape[-2]
    core = _paired(rows[..., :rank, :], rows[..., rank:, :], size_query, size_key, independent=True)
    apart, whole = (torch.linalg.matrix_norm(t.detach()) for t in (core.half, core.query))
    return core, trusted & (inverse * whole <= TRUSTED_INVERSE * apart)


def inner(query: Float[Tensor, "*#batch r d"], key: Float[Tensor, "*#batch n d"]) -> Float[Tensor, "*out r n"]:
    """query @ keyᵀ; under GQA queries are multiplied as one tall matrix, since matmul would copy the key."""
    if query.ndim > 2 and query.ndim == key.ndim and key.shape[-3] == 1:
        tall = query.flatten(-3, -2) @ key.squeeze(-3).mT
        return tall.unflatten(-2, query.shape[-3:-1])
    return query @ key.mT


def _gram(query: Tensor, key: Tensor, covariance: Tensor | None) -> Tensor:
    """XΣXᵀ of X = [Q; K], (..., 2r, 2r)."""
    on_query = query if covariance is None else query @ covariance.double()
    on_key = key if covariance is None else key @ covariance.double()
    batch = broadcast(query.shape[:-2], key.shape[:-2])
    rank = query.shape[-2]
    cross = inner(on_query, key)
    gram = query.new_empty(*batch, 2 * rank, 2 * rank)
    gram[..., :rank, :rank] = on_query @ query.mT
    gram[..., rank:, rank:] = on_key @ key.mT
    gram[..., :rank, rank:], gram[..., rank:, :rank] = cross, cross.mT
    return gram


def row_exponents(rows: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows 1"]:
    """⌊log₂⌋ of the largest entry of each row, float64; 0 for a row of zeros. A constant to autograd.

    At most 1000 in size, so that 2 to that power and its inverse are numbers of float64.
    """
    return _logs(rows).floor().nan_to_num(neginf=0.0).clamp(-1000, 1000)


def times(tensor: Tensor, exponents: Tensor) -> Tensor:
    """tensor · 2^exponents in the tensor's dtype; in two steps where one power would be beyond its range."""
    if not exponents.is_meta and exponents.abs().max() < math.log2(torch.finfo(tensor.dtype).max) - 2:
        return tensor * exponents.exp2().to(tensor.dtype)
    first = (exponents / 2).trunc()
    return tensor * first.exp2().to(tensor.dtype) * (exponents - first).exp2().to(tensor.dtype)


def balance(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The same form with each pair of rows scaled to equal length, in their own dtype."""
    lift, _ = _lift_and_unit(_logs(query), _logs(key), query.dtype)
    return times(query, lift), times(key, -lift)


def balanced(
    query: Tensor, key: Tensor, size_query: Tensor | float = 0.0, size_key: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of equal length, the longest about 1, of the factors 2^size·rows: query, key, lift, unit.

    The result is the factors' query times 2^(lift − unit) and their key times 2^(−lift − unit): their form is M/4^unit.
    """
    lift, unit = _lift_and_unit(_logs(query) + size_query, _logs(key) + size_key, query.dtype)
    return times(query, size_query + lift - unit), times(key, size_key - lift - unit), lift, unit


def halved(covariance: Float[Tensor, "d d"]) -> tuple[Float[Tensor, "d d"], Float[Tensor, ""]]:
    """Σ/4^size with entries near 1, and size: tokens divided by 2^size have this covariance."""
    size = (_logs(covariance.flatten()) / 2).floor().nan_to_num(neginf=0.0).squeeze(-1)
    return times(covariance, -2 * size), size


def _lift_and_unit(query: Tensor, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Exponents of 2 by which query rows grow and key rows shrink, and the size of the largest pair."""
    unit = ((query + key) / 2).round().amax(-2, keepdim=True).nan_to_num(neginf=0.0)
    lift = (key - query) / 2
    # A row whose partner is zero adds nothing to M but rounding: it is shrunk far below the others.
    faint = unit - math.log2(torch.finfo(dtype).max) // 2
    lift = lift.where(~query.isneginf(), key - faint).where(~key.isneginf(), faint - query)
    return lift.round().nan_to_num(posinf=0.0, neginf=0.0), unit


def _logs(rows: Tensor) -> Tensor:
    """log₂ of the largest entry of each row (..., 1), float64; −∞ for a row of zeros."""
    return rows.detach().abs().amax(-1, keepdim=True).double().log2()
