"""`check_form`: all metrics of a Form against dense float64 linear algebra."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms import Form
from keyquery.forms.measures import ZERO_FORM, ZERO_VALUE


def check_form(form: Form, tolerance: float | None = None) -> None:
    """Compare the norms, spectra, parts and directions of a form with dense float64 algebra.

    Errors are relative to ‖M‖, those of spectra and vectors to σ₁, those of the dense parts, which are products in the
    form's own dtype, to ‖Q‖‖K‖. It forms d×d matrices: keep d small.

    Parameters
    ----------
    form
        The form to test.
    tolerance
        Largest relative error. Default: 1e-10 for float64 factors, 1e-5 for float32, four roundings for half precision.

    Raises
    ------
    AssertionError
        Where they differ.

    Examples
    --------
    >>> kq.testing.check_form(kq.Form(torch.randn(2, 3, 8), torch.randn(2, 3, 8)))
    """
    check = _Check(form, default_tolerance(form.dtype) if tolerance is None else tolerance)
    check.parts()
    check.norms()
    check.spectra()
    check.directions()
    check.projections()


def default_tolerance(dtype: torch.dtype) -> float:
    """1e-10 for float64, 1e-5 for float32, four roundings for shorter floats."""
    return {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 4 * torch.finfo(dtype).eps)


class _Check:
    """A form beside its dense M, S and A in float64."""

    def __init__(self, form: Form, tolerance: float) -> None:
        self.form, self.tolerance = form, tolerance
        query, key = form.wide()
        self.M = query.mT @ key
        self.S, self.A = (self.M + self.M.mT) / 2, (self.M - self.M.mT) / 2
        self.sigma = torch.linalg.svdvals(self.M)
        self.norm = torch.linalg.matrix_norm(self.M)
        factors = torch.linalg.matrix_norm(query) * torch.linalg.matrix_norm(key)
        self.rounding = ZERO_FORM * factors + 1e-37
        self.zero = self.norm <= self.rounding
        self.floor = torch.maximum(ZERO_VALUE * self.norm, self.rounding)

    def close(self, name: str, given: Tensor, expected: Tensor, scale: Tensor) -> None:
        """Of the unit of M: as exact as `scale` asks for, or as the product of the factors can be."""
        self._within(name, given, expected, self.tolerance * scale + self.rounding)

    def close_ratio(self, name: str, given: Tensor, expected: Tensor, scale: Tensor | float = 1.0) -> None:
        """For dimensionless quantities: rounding is relative to ‖M‖."""
        rounding = torch.where(self.zero, 0.0, 10 * self.rounding / self.norm)
        self._within(name, given, expected, (self.tolerance + rounding) * scale)

    def _within(self, name: str, given: Tensor, expected: Tensor, allowed: Tensor) -> None:
        assert given.shape == expected.shape, f"{name}: shape {tuple(given.shape)}, not {tuple(expected.shape)}"
        assert torch.isfinite(given).all(), f"{name}: not finite"
        allowed = allowed[(..., *[None] * (given.ndim - allowed.ndim))]
        error = (given.double() - expected).abs()
        bad = error > allowed
        assert not bad.any(), f"{name}: off by {float(error[bad].max()):.3g}, allowed {float(allowed.min()):.3g}"

    def parts(self) -> None:
        scale = self.rounding / ZERO_FORM
        for name, given, expected in (
            ("dense", self.form, self.M),
            ("symmetric", self.form.symmetric, self.S),
            ("skew", self.form.skew, self.A),
            ("mT", self.form.mT, self.M.mT),
        ):
            self.close(name, given.dense(), expected, scale)

    def norms(self) -> None:
        form, M = self.form, self.M
        self.close("norm2", form.norm2.sqrt(), self.norm, self.norm)
        self.close("trace", form.trace(), M.diagonal(dim1=-2, dim2=-1).sum(-1), self.norm)
        self.close("row_norms", form.row_norms(), torch.linalg.vector_norm(M, dim=-1), self.norm)
        self.close("column_norms", form.column_norms(), torch.linalg.vector_norm(M, dim=-2), self.norm)
        symmetry = (M * M.mT).sum((-2, -1)) / self.norm**2
        self.close_ratio("symmetry", form.symmetry, torch.where(self.zero, 0.0, symmetry))

    def spectra(self) -> None:
        form, top = self.form, self.sigma[..., 0]
        eigenvalues = torch.linalg.eigvalsh(self.S)
        count = min(2 * form.rank, form.dim)
        self.close("symmetric_eigenvalues", form.symmetric_eigenvalues(), _largest(eigenvalues, count), top)
        self.close("skew_values", form.skew_values(), torch.linalg.svdvals(self.A)[..., :count], top)
        self.close("singular_values", form.singular_values(), self.sigma[..., : min(form.rank, form.dim)], top)
        energy = eigenvalues.square().sum(-1)
        share = eigenvalues.clamp(min=0).square().sum(-1) / energy
        there = energy > self.floor**2
        scale = torch.where(there, self.norm / energy.sqrt(), 1.0)
        self.close_ratio("positive_share", form.positive_share, torch.where(there, share, 0.0), scale)
        signature = torch.stack(form.signature())
        assert bool((signature.sum(0) == form.dim).all()), "signature: counts do not sum to d"
        floor = self.floor.unsqueeze(-1)
        assert torch.equal(signature[0], (eigenvalues > floor).sum(-1)), "signature: positive count"
        assert torch.equal(signature[1], (eigenvalues < -floor).sum(-1)), "signature: negative count"
        self.ranks()

    def ranks(self) -> None:
        entropy = torch.special.entr(self.sigma / self.sigma.sum(-1, keepdim=True)).sum(-1)
        effective = torch.where(self.zero, 0.0, entropy.exp())
        self.close_ratio("effective_rank", self.form.effective_rank(), effective, self.sigma.shape[-1] ** 2)
        stable = torch.where(self.zero, 0.0, (self.norm / self.sigma[..., 0]) ** 2)
        self.close_ratio("stable_rank", self.form.stable_rank(), stable, self.sigma.shape[-1])

    def directions(self) -> None:
        form, top = self.form, self.sigma[..., 0]
        left, values, right = form.svd()
        self.close("svd", (left * values.unsqueeze(-2)) @ right.mT, self.M, top)
        self.orthonormal("svd: left", left)
        self.orthonormal("svd: right", right)
        values, vectors = form.eigh()
        self.close("eigh", (vectors * values.unsqueeze(-2)) @ vectors.mT, self.S, top)
        self.orthonormal("eigh", vectors)
        values, source, target = form.skew_planes()
        turn = (source * values.unsqueeze(-2)) @ target.mT
        self.close("skew_planes", turn - turn.mT, self.A, top)
        self.orthonormal("skew_planes", torch.cat((source, target), dim=-1))

    def orthonormal(self, name: str, vectors: Float[Tensor, "*batch d k"]) -> None:
        gram = vectors.mT @ vectors
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
        allowed = torch.tensor(1e-10, dtype=torch.float64, device=gram.device)
        self._within(f"{name}: not orthonormal", gram, eye, allowed)

    def projections(self) -> None:
        values, vectors = torch.linalg.eigh(self.S)
        positive = (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
        self.close("nearest psd", self.form.nearest("psd").dense(), positive, self.sigma[..., 0])


def _largest(values: Tensor, count: int) -> Tensor:
    """The `count` values of largest magnitude, descending."""
    kept = values.abs().argsort(dim=-1, descending=True)[..., :count]
    return values.gather(-1, kept).sort(dim=-1, descending=True).values
