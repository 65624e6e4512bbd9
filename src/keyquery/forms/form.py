"""A head's score as a bilinear form xᵀMy, kept as the two factors of M = QᵀK."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms import display
from keyquery.forms.balance import halved, row_exponents, times
from keyquery.forms.core import Core, core
from keyquery.forms.derivatives import differentiated, refuse_nan
from keyquery.forms.directions import Directions
from keyquery.forms.factors import Factors
from keyquery.forms.measures import ZERO_FORM
from keyquery.support.checks import check_batches, check_choice, check_count, check_float, check_range

KERNELS = ("symmetric", "psd", "skew")


class Shares(NamedTuple):
    """Shares of the variance of a head's scores over independent tokens; they sum to 1."""

    symmetric: Float[Tensor, "*batch"]
    skew: Float[Tensor, "*batch"]
    popularity: Float[Tensor, "*batch"]

    def __repr__(self) -> str:
        return display.brief(self)


class Form(Factors, Directions):
    """The bilinear form M = QᵀK of a query and a key factor, with any leading batch of layers and heads.

    M is never built. Query and key are (..., r, d), as a linear layer stores them for one head; their leading
    dimensions broadcast, so that keys shared by a group of queries are kept once: (8, 4, r, d) and (8, 1, r, d).
    Sums, multiples, transposes, parts and changes of basis of Forms are Forms again. Numbers are computed in
    float64 from factors of any floating dtype and size. A Form is a value: build a new one when the weights have
    changed. Derivatives may be taken by `torch.func` (grad, jacrev, jacfwd, hessian); vmap raises, since a Form has a
    batch of its own.

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

    def core(self) -> Core:
        """The form in the at most 2r dimensions that it acts in; kept until a factor is changed in place."""
        tensors = [t for t in (self._query, self._key, self._covariance) if t is not None]
        if any(t.is_inference() or differentiated(t) for t in tensors):
            return core(self._query, self._key, self._covariance)
        versions = tuple(t._version for t in tensors)
        if self._known is None or self._known[0] != versions:
            self._known = versions, core(self._query, self._key, self._covariance)
        return self._known[1]

    def gram(self) -> Float[Tensor, "*batch n n"]:
        """XXᵀ of X = [Q; K] (XΣXᵀ on data), float64: all that norms and spectra depend on.

        >>> kq.Form(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8]])).gram()
        tensor([[1.0000, 0.6000],
                [0.6000, 1.0000]], dtype=torch.float64)
        """
        core = self.core()
        query, key = times(core.query, core.unit - core.lift), times(core.key, core.unit + core.lift)
        rows = torch.cat((query, key), dim=-2)
        return rows @ rows.mT

    @classmethod
    def from_gram(cls, gram: Float[Tensor, "*batch n n"]) -> Form:
        """A form in 2r dimensions with a given Gram matrix of [Q; K], such as the covariance of queries and keys.

        The form is known up to an orthogonal change of basis, so that all norms and spectra are those of the form that
        the Gram matrix was taken of: `Form.from_gram(form.gram())` has the numbers of `form`. A Gram matrix is
        symmetric and positive semi-definite; one that is not, by more than the rounding of its dtype, is refused. The
        columns of [Q; K] are orthogonal.

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
        # Queries and keys have units of their own; in one, the smaller of the two would pass for rounding.
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

    # On tokens and on data

    def scores(
        self, x: Float[Tensor, "*#tokens d"], y: Float[Tensor, "*#others d"] | None = None
    ) -> Float[Tensor, "*scores"]:
        """xᵀMy, unscaled, for tokens x (..., n, d) and y (..., m, d): (..., n, m). Leading dimensions broadcast.

        >>> kq.Form(torch.eye(2), torch.eye(2)).scores(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[ 5., 11.],
                [11., 25.]])
        """
        y = x if y is None else y
        self._check_tokens(x, y)
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), self.dtype)
        query = torch.atleast_2d(x).to(dtype) @ self.query.to(dtype).mT
        key = torch.atleast_2d(y).to(dtype) @ self.key.to(dtype).mT
        return _drop_single(query @ key.mT, x, y)

    def on(self, covariance: Float[Tensor, "d d"]) -> Form:
        """Σ^½MΣ^½: the form as it acts on data of centred covariance Σ, still factored.

        Norms and spectra come from QΣKᵀ and its like; the square root is taken only where `query`, `key`, `dense()`,
        rows or directions are asked for, or where the factors are dependent.

        >>> kq.Form(torch.eye(2), torch.eye(2)).on(torch.diag(torch.tensor([4.0, 1.0]))).eigenvalues()
        tensor([4., 1.], dtype=torch.float64)
        """
        check_float("covariance", covariance, "d d", d=self.dim)
        _check_psd("covariance", covariance.detach().double(), torch.finfo(covariance.dtype).eps)
        query, key = (self._query, self._key) if self._covariance is None else (self.query, self.key)
        return Form._trusted(query, key, covariance.to(self.device))

    def on_sample(self, x: Float[Tensor, "n d"]) -> Form:
        """The form on the tokens x (n, d): `.on` their centred covariance (x − x̄)ᵀ(x − x̄)/n.

        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -3.0]])
        >>> kq.Form(torch.eye(2), torch.eye(2)).on_sample(x).eigenvalues()
        tensor([4.5000, 0.5000], dtype=torch.float64)
        """
        check_float("x", x, "n d", d=self.dim)
        if len(x) < 2:
            raise ValueError(f"x must hold at least two tokens to have a covariance, got {len(x)}")
        centred = x.double() - x.double().mean(0)
        return self.on(centred.mT @ centred / len(x))

    def shares(
        self,
        covariance: Float[Tensor, "d d"],
        mean: Float[Tensor, " d"],
        query_bias: Float[Tensor, "*#batch r"] | None = None,
    ) -> Shares:
        """Symmetric, skew and popularity shares of the scores between tokens of mean μ and covariance Σ.

        xᵀMy = (x−μ)ᵀS(y−μ) + (x−μ)ᵀA(y−μ) + pᵀ(y−μ) + terms that are the same for every key, p = Mᵀμ + Kᵀb_q.
        Softmax does not see the latter; the variances of the first three are ‖Σ^½SΣ^½‖², ‖Σ^½AΣ^½‖² and pᵀΣp,
        and a share is its variance over their sum (all 0 where the head scores every key alike).

        >>> form = kq.Form(torch.eye(2), torch.eye(2))
        >>> [round(float(share), 2) for share in form.shares(torch.eye(2), mean=torch.tensor([1.0, 1.0]))]
        [0.5, 0.0, 0.5]
        """
        check_float("mean", mean, "d", d=self.dim)
        check_float("covariance", covariance, "d d", d=self.dim)
        # Tokens, and a bias with them, over a power of two: the same shares, and numbers that do not overflow.
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
        # What cancels in the factors leaves rounding behind, which is no share of anything.
        _, factors = core.size
        at_mean_size = (query.abs() @ mean.abs()).norm(dim=-1) * torch.linalg.matrix_norm(core.key)
        rounding = ZERO_FORM**2 * (factors**2 + at_mean_size**2).detach()
        variances = torch.stack(torch.broadcast_tensors(*core.squares, popularity))
        variances = torch.where(variances > rounding, variances, 0.0)
        total = variances.sum(0)
        return Shares(*(variances / torch.where(total > 0, total, 1.0)))

    def distance(self, x: Float[Tensor, "*#tokens d"], y: Float[Tensor, "*#others d"]) -> Float[Tensor, "*distances"]:
        """Mahalanobis distance √((x−y)ᵀM(x−y)) of tokens x (..., n, d) and y (..., m, d): (..., n, m); M must be PSD.

        >>> form = kq.Form(torch.eye(2), torch.eye(2))
        >>> form.distance(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))
        tensor(5., dtype=torch.float64)
        """
        self._check_tokens(x, y)
        self._require_psd()
        rows = self.wide()[0] if self._query is self._key else self._positive_rows()
        size = row_exponents(rows).amax(-2, keepdim=True)
        left, right = (torch.atleast_2d(t).double() @ times(rows, -size).mT for t in (x, y))
        gaps = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
        return _drop_single(times(gaps, size), x, y)

    # Structure

    def nearest(self, kernel: str, rank: int | None = None) -> Form:
        """The Frobenius-nearest `"symmetric"`, `"psd"` or `"skew"` form, of at most a given rank.

        >>> kq.Form(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])).nearest("psd").dense()
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]])
        """
        check_choice("kernel", kernel, KERNELS)
        check_count("rank", rank, 1, self.dim, optional=True)
        if kernel == "psd":
            query = key = self._positive_rows(rank).to(self.dtype)
        elif rank is None:
            return self.symmetric if kernel == "symmetric" else self.skew
        elif kernel == "symmetric":
            query, key = self._symmetric_rows(min(rank, 2 * self.rank))
        elif rank % 2:
            raise ValueError(f"rank of a skew form must be even, since it turns in planes, got {rank}")
        else:
            values, source, target = self.skew_planes(min(rank, 2 * self.rank) // 2)
            source, target = (t.mT * values.sqrt().unsqueeze(-1) for t in (source, target))
            query, key = torch.cat((source, -target), dim=-2), torch.cat((target, source), dim=-2)
        query, key = query.to(self.dtype), key.to(self.dtype)
        check_range("the nearest form", query, key)
        return Form._trusted(query, key)

    # How it looks

    def __repr__(self) -> str:
        return display.line(self)

    def _repr_html_(self) -> str:
        return display.table(self)

    def _check_tokens(self, x: Tensor, y: Tensor) -> None:
        check_float("x", x, "... d", d=self.dim)
        check_float("y", y, "... d", d=self.dim)
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
                'their ‖M‖² is skew or negative; form.nearest("psd") is'
            )


def _turn(rows: Tensor, none: Tensor) -> Tensor:
    """The orthogonal turn W of (..., n, n) rows that makes their columns orthogonal; those that are `none` stay 0."""
    inner = rows.mT @ rows
    # Columns of zeros are set apart from those that are only short, and come first.
    inner = inner - torch.diag_embed(none * inner.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True))
    first = torch.arange(none.shape[-1], device=none.device) < none.sum(-1, keepdim=True)
    return torch.linalg.eigh(inner).eigenvectors.masked_fill(first.unsqueeze(-2), 0.0)


def _check_psd(name: str, matrix: Tensor, eps: float, shown: Tensor | None = None) -> None:
    """Symmetric and positive semi-definite (..., n, n), up to the rounding of its dtype; `shown` in other units."""
    slack = max(1e-6, 8 * eps) * matrix.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    if ((matrix - matrix.mT).abs().amax((-2, -1)) > slack).any():
        raise ValueError(f"{name} must be symmetric, got a matrix that differs from its transpose")
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    # A matrix of zeros is positive semi-definite, and has no size to lift it by.
    lift = torch.where(matrix.any(-1).any(-1) | (slack > 0), slack, 1.0)
    if torch.linalg.cholesky_ex(matrix + lift[..., None, None] * eye).info.any():
        least = torch.linalg.eigvalsh(matrix if shown is None else shown).min()
        raise ValueError(f"{name} must be positive semi-definite, got one with an eigenvalue of {least:.3g}")


def _drop_single(pairs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(..., n, m) without the dimensions of x and y that were given as one token (d,)."""
    pairs = pairs.squeeze(-2) if x.ndim == 1 else pairs
    return pairs.squeeze(-1) if y.ndim == 1 else pairs
