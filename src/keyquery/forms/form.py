"""The QK form of a head: the bilinear form xᵀMy, stored as the two factors of M = QᵀK."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms import display
from keyquery.forms.core import halved, row_exponents, times
from keyquery.forms.derivatives import refuse_nan
from keyquery.forms.directions import Directions, root_rows
from keyquery.forms.matrix import Matrix
from keyquery.forms.measures import ZERO_FORM
from keyquery.support.checks import check_batches, check_choice, check_count, check_float, check_range

KERNELS = ("symmetric", "psd", "skew")


class Shares(NamedTuple):
    """Shares of a head's score variance over independent tokens, by part; they sum to 1."""

    symmetric: Float[Tensor, "*batch"]  # of the part that stays when x and y change places
    skew: Float[Tensor, "*batch"]  # of the part that changes its sign
    popularity: Float[Tensor, "*batch"]  # of the key-only part

    def __repr__(self) -> str:
        return display.brief(self)


class Form(Matrix, Directions):
    """QK form of attention heads: the bilinear form xᵀMy, M = QᵀK, stored as factors, batched over layers and heads.

    M itself is formed only by `dense()`. Sums, multiples, products, transposes, parts, rows and changes of basis of
    Forms are Forms; `form @ x` and `form[i, j]` are as for the matrix M.
    Metrics are computed in float64 from factors of any floating dtype. A Form is a value: create a new one after the
    weights have changed. Metrics have first derivatives, and second ones where factors are independent; vmap raises,
    since a Form has its own batch.

    Parameters
    ----------
    query, key
        Q (..., r, d) and K (..., r, e), as a linear layer stores them for one head. Leading dimensions broadcast, so
        that GQA stores shared keys once: (8, 4, r, d) and (8, 1, r, d). If e ≠ d, as for cross-attention between
        models of different width, M is rectangular: what needs one space (S, A, eigenvalues, data) raises.

    See Also
    --------
    kq.read : the heads of a model, each with its Form.
    kq.look : the analysis of all heads of a model.

    Examples
    --------
    >>> form = kq.Form(query=torch.tensor([[1.0, 0.0]]), key=torch.tensor([[0.6, 0.8]]))
    >>> form
    Form(r=1, d=2, float32, symmetry 0.36, effective rank 1.0)
    >>> form.dense()
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    >>> form.symmetric.dense() + form.skew.dense()
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """

    def gram(self) -> Float[Tensor, "*batch n n"]:
        """Gram matrix XXᵀ of X = [Q; K] (XΣXᵀ on data), in float64; it determines all norms and spectra."""
        self.require_square("a Gram matrix of [Q; K]")
        core = self.core()
        query, key = times(core.query, core.unit - core.lift), times(core.key, core.unit + core.lift)
        rows = torch.cat((query, key), dim=-2)
        return rows @ rows.mT

    @classmethod
    def from_gram(cls, gram: Float[Tensor, "*batch n n"]) -> Form:
        """A form in 2r dimensions from the Gram matrix of [Q; K], such as the covariance of queries and keys.

        The form is determined up to an orthogonal change of basis: `Form.from_gram(form.gram())` has the norms and
        spectra of `form`. The columns of its [Q; K] are orthogonal.

        Parameters
        ----------
        gram
            (..., 2r, 2r), symmetric and positive semi-definite up to the rounding of its dtype.

        Raises
        ------
        ValueError
            If `gram` is not square with an even side, not symmetric, or not positive semi-definite.

        Examples
        --------
        >>> form = kq.Form.from_gram(torch.tensor([[1.0, 0.6], [0.6, 1.0]]))
        >>> round(float(form.symmetry), 4)
        0.36
        >>> kq.Form.from_gram(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
        Traceback (most recent call last):
        ValueError: gram must be positive semi-definite, got one with an eigenvalue of -1
        """
        check_float("gram", gram, "... n n")
        size = gram.shape[-1]
        if size % 2 or gram.shape[-2] != size:
            raise ValueError(f"gram must be square with an even side 2r, got {tuple(gram.shape)}")
        rank, wide = size // 2, gram.double()
        # Queries and keys are scaled separately; otherwise the smaller of the two would be taken for rounding.
        diagonal = wide.detach().diagonal(dim1=-2, dim2=-1).unflatten(-1, (2, rank))
        unit = (row_exponents(diagonal) / 2).round().expand_as(diagonal).flatten(-2)
        wide = times(times(wide, -unit.unsqueeze(-1)), -unit.unsqueeze(-2))
        _check_psd("gram", wide.detach(), torch.finfo(gram.dtype).eps, gram.detach().double())
        values, vectors = torch.linalg.eigh(refuse_nan(wide, "forms of a Gram matrix"))
        none = values <= size * torch.finfo(torch.float64).eps * values[..., -1:].clamp(min=0)
        rows = vectors * torch.where(none, 0.0, values).sqrt().unsqueeze(-2)
        rows = times(rows, unit.unsqueeze(-1))
        rows = rows @ _turn(rows.detach(), none)
        return cls._trusted(rows[..., :rank, :], rows[..., rank:, :])

    # On tokens and data

    def scores(
        self, x: Float[Tensor, "*#tokens d"], y: Float[Tensor, "*#others e"] | None = None
    ) -> Float[Tensor, "*scores"]:
        """Unscaled scores xᵀMy (..., n, m) of tokens x (..., n, d) and y (..., m, e); leading dimensions broadcast."""
        if y is None:
            self.require_square("a score of tokens with themselves")
            y = x
        self._check_tokens(x, y)
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), self.dtype)
        query = torch.atleast_2d(x).to(dtype) @ self.query.to(dtype).mT
        key = torch.atleast_2d(y).to(dtype) @ self.key.to(dtype).mT
        return _drop_single(query @ key.mT, x, y)

    def on(self, covariance: Float[Tensor, "d d"]) -> Form:
        """The covariance-weighted form Σ^½MΣ^½, for data of centred covariance Σ (d, d), still factored.

        Norms and spectra are computed from QΣKᵀ, QΣQᵀ and KΣKᵀ; the square root is computed only for `query`, `key`,
        `dense()`, rows or directions, or if the factors are linearly dependent.
        """
        self.require_square("a form on data")
        check_float("covariance", covariance, "d d", d=self.dim)
        _check_psd("covariance", covariance.detach().double(), torch.finfo(covariance.dtype).eps)
        query, key = (self._query, self._key) if self._covariance is None else (self.query, self.key)
        return Form._trusted(query, key, covariance.to(self.device))

    def shares(
        self,
        covariance: Float[Tensor, "d d"],
        mean: Float[Tensor, " d"],
        query_bias: Float[Tensor, "*#batch r"] | None = None,
    ) -> Shares:
        """Symmetric, skew and popularity shares of the score variance between tokens of mean μ and covariance Σ.

            xᵀMy = (x−μ)ᵀS(y−μ) + (x−μ)ᵀA(y−μ) + pᵀ(y−μ) + query-only terms,   p = Mᵀμ + Kᵀb_q

        Softmax ignores query-only terms. The variances of the first three are ‖Σ^½SΣ^½‖², ‖Σ^½AΣ^½‖² and pᵀΣp; a
        share is its variance over their sum, or 0 if all three vanish.

        Parameters
        ----------
        covariance, mean
            Σ (d, d) and μ (d,).
        query_bias
            b_q (..., r). Default: none.

        Returns
        -------
        Shares
            (symmetric, skew, popularity), each with the batch of the form.

        Examples
        --------
        >>> form = kq.Form(torch.eye(2), torch.eye(2))
        >>> [round(float(share), 2) for share in form.shares(torch.eye(2), mean=torch.tensor([1.0, 1.0]))]
        [0.5, 0.0, 0.5]
        """
        check_float("mean", mean, "d", d=self.dim)
        check_float("covariance", covariance, "d d", d=self.dim)
        # Tokens and bias are divided by a power of two, which leaves the shares unchanged and avoids overflow.
        covariance, size = halved(covariance.double())
        core, mean = self.on(covariance).core(), times(mean.double(), -size)
        query, key = self.wide()
        query, key = times(query, core.lift - core.unit), times(key, -core.lift - core.unit)
        at_mean = query @ mean
        if query_bias is not None:
            check_float("query_bias", query_bias, "... r", r=self.rank)
            check_batches(query_bias=query_bias.shape[:-1], form=self.batch)
            at_mean = at_mean + times(query_bias.double(), (core.lift - core.unit).squeeze(-1) - size)
        pull = (key.mT @ at_mean.unsqueeze(-1)).squeeze(-1)
        popularity = (pull @ covariance * pull).sum(-1)
        # Variances at the level of rounding are 0.
        _, factors = core.size
        at_mean_size = (query.abs() @ mean.abs()).norm(dim=-1) * torch.linalg.matrix_norm(core.key)
        rounding = ZERO_FORM**2 * (factors**2 + at_mean_size**2).detach()
        variances = torch.stack(torch.broadcast_tensors(*core.squares, popularity))
        variances = torch.where(variances > rounding, variances, 0.0)
        total = variances.sum(0)
        return Shares(*(variances / torch.where(total > 0, total, 1.0)))

    def distance(self, x: Float[Tensor, "*#tokens d"], y: Float[Tensor, "*#others d"]) -> Float[Tensor, "*distances"]:
        """Mahalanobis distances √((x−y)ᵀM(x−y)) (..., n, m) of tokens x (..., n, d) and y (..., m, d) by a PSD form."""
        self.require_square("a distance")
        self._check_tokens(x, y)
        self._require_psd()
        rows = self.wide()[0] if self._query is self._key else self._positive_rows()
        size = row_exponents(rows).amax(-2, keepdim=True)
        left, right = (torch.atleast_2d(t).double() @ times(rows, -size).mT for t in (x, y))
        gaps = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
        return _drop_single(times(gaps, size), x, y)

    # Structure

    def nearest(self, kernel: str, rank: int | None = None) -> Form:
        """The nearest "symmetric", "psd" or "skew" form in Frobenius norm, of at most `rank`. Default rank: any."""
        self.require_square("the nearest form")
        check_choice("kernel", kernel, KERNELS)
        check_count("rank", rank, 1, self.dim, optional=True)
        if kernel == "psd":
            query = key = self._positive_rows(rank).to(self.dtype)
        elif rank is None:
            return self.symmetric if kernel == "symmetric" else self.skew
        elif kernel == "symmetric":
            values, vectors = self.eigh(min(rank, 2 * self.rank))
            query = root_rows(values, vectors, values != 0)
            key = query * values.sign().unsqueeze(-1)
        elif rank % 2:
            raise ValueError(f"the rank of a skew form must be even, got {rank}")
        else:
            values, source, target = self.skew_planes(min(rank, 2 * self.rank) // 2)
            source, target = (t.mT * values.sqrt().unsqueeze(-1) for t in (source, target))
            query, key = torch.cat((source, -target), dim=-2), torch.cat((target, source), dim=-2)
        query, key = query.to(self.dtype), key.to(self.dtype)
        check_range("the nearest form", query, key)
        return Form._trusted(query, key)

    # Display

    __repr__ = display.line
    _repr_html_ = display.table

    def _check_tokens(self, x: Tensor, y: Tensor) -> None:
        check_float("x", x, "... d", d=self.dim)
        check_float("y", y, "... d", d=self.key_dim)
        check_batches(x=x.shape[:-2], y=y.shape[:-2], form=self.batch)

    def _require_psd(self) -> None:
        core = self.core()
        negative = core.eigenvalues.clamp(max=0).square().sum(-1)
        symmetric, skew = core.squares
        rounding = max(1e-12, 8 * torch.finfo(self.dtype).eps)
        bad = skew + negative > rounding**2 * (symmetric + skew)
        if bad.any():
            share = float(((skew + negative) / (symmetric + skew))[bad].max())
            raise ValueError(
                f"a distance needs a PSD form, but {int(bad.sum())} of {bad.numel()} are not: up to {share:.2g} of "
                'their ‖M‖² is skew or negative; use form.nearest("psd")'
            )


def _turn(rows: Tensor, none: Tensor) -> Tensor:
    """The rotation W of (..., n, n) rows that makes their columns orthogonal; columns that are `none` stay 0."""
    inner = rows.mT @ rows
    # Zero columns are separated from small ones, and come first.
    inner = inner - torch.diag_embed(none * inner.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True))
    first = torch.arange(none.shape[-1], device=none.device) < none.sum(-1, keepdim=True)
    return torch.linalg.eigh(inner).eigenvectors.masked_fill(first.unsqueeze(-2), 0.0)


def _check_psd(name: str, matrix: Tensor, eps: float, shown: Tensor | None = None) -> None:
    """Require (..., n, n) to be symmetric and PSD up to rounding; `shown` is the matrix for the error message."""
    slack = max(1e-6, 8 * eps) * matrix.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    if ((matrix - matrix.mT).abs().amax((-2, -1)) > slack).any():
        raise ValueError(f"{name} must be symmetric, got a matrix that differs from its transpose")
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    # A zero matrix is positive semi-definite, and has no scale to shift it by.
    lift = torch.where(matrix.any(-1).any(-1) | (slack > 0), slack, 1.0)
    if torch.linalg.cholesky_ex(matrix + lift[..., None, None] * eye).info.any():
        least = torch.linalg.eigvalsh(matrix if shown is None else shown).min()
        raise ValueError(f"{name} must be positive semi-definite, got one with an eigenvalue of {least:.3g}")


def _drop_single(pairs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(..., n, m) without the dimensions of x and y that are single tokens (d,)."""
    pairs = pairs.squeeze(-2) if x.ndim == 1 else pairs
    return pairs.squeeze(-1) if y.ndim == 1 else pairs
