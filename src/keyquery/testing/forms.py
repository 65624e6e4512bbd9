"""`check_form`: all metrics of a Form against dense float64 linear algebra."""

from __future__ import annotations

import torch
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
    default = {torch.float64: 1e-10, torch.float32: 1e-5}.get(form.dtype, 4 * torch.finfo(form.dtype).eps)
    check = _Check(form, default if tolerance is None else tolerance)
    check.numbers()
    check.matrices()


class _Check:
    """A form beside its dense M, S and A in float64."""

    def __init__(self, form: Form, tolerance: float) -> None:
        self.form, self.tolerance = form, tolerance
        query, key = form.wide()
        self.M = query.mT @ key
        self.S, self.A = (self.M + self.M.mT) / 2, (self.M - self.M.mT) / 2
        self.sigma = torch.linalg.svdvals(self.M)
        self.top, self.norm = self.sigma[..., 0], torch.linalg.matrix_norm(self.M)
        self.factors = torch.linalg.matrix_norm(query) * torch.linalg.matrix_norm(key)
        self.rounding = ZERO_FORM * self.factors + 1e-37
        self.zero = self.norm <= self.rounding
        self.floor = torch.maximum(ZERO_VALUE * self.norm, self.rounding)
        # Dimensionless numbers: rounding is relative to ‖M‖.
        self.of_ratios = tolerance + torch.where(self.zero, 0.0, 10 * self.rounding / self.norm)

    def close(self, name: str, given: Tensor, expected: Tensor, scale: Tensor) -> None:
        """Of the unit of M: as exact as `scale` asks for, or as the product of the factors can be."""
        self.within(name, given, expected, self.tolerance * scale + self.rounding)

    def within(self, name: str, given: Tensor, expected: Tensor, allowed: Tensor) -> None:
        assert given.shape == expected.shape, f"{name}: shape {tuple(given.shape)}, not {tuple(expected.shape)}"
        assert torch.isfinite(given).all(), f"{name}: not finite"
        allowed = allowed[(..., *[None] * (given.ndim - allowed.ndim))]
        error = (given.double() - expected).abs()
        bad = error > allowed
        assert not bad.any(), f"{name}: off by {float(error[bad].max()):.3g}, allowed {float(allowed.min()):.3g}"

    def matrices(self) -> None:
        """Parts, and products of directions."""
        form, top = self.form, self.top
        left, sigma, right = form.svd()
        eigenvalues, vectors = form.eigh()
        values, source, target = form.skew_planes()
        turn = (source * values.unsqueeze(-2)) @ target.mT
        exact, basis = torch.linalg.eigh(self.S)
        positive = (basis * exact.clamp(min=0).unsqueeze(-2)) @ basis.mT
        for name, given, expected, scale in (
            ("dense", form.dense(), self.M, self.factors),
            ("symmetric", form.symmetric.dense(), self.S, self.factors),
            ("skew", form.skew.dense(), self.A, self.factors),
            ("mT", form.mT.dense(), self.M.mT, self.factors),
            ("svd", (left * sigma.unsqueeze(-2)) @ right.mT, self.M, top),
            ("eigh", (vectors * eigenvalues.unsqueeze(-2)) @ vectors.mT, self.S, top),
            ("skew_planes", turn - turn.mT, self.A, top),
            ("nearest psd", form.nearest("psd").dense(), positive, top),
        ):
            self.close(name, given, expected, scale)
        planes = torch.cat((source, target), dim=-1)
        for name, frame in (("svd: left", left), ("svd: right", right), ("eigh", vectors), ("skew_planes", planes)):
            gram = frame.mT @ frame
            eye = torch.eye(gram.shape[-1]).to(gram).expand_as(gram)
            self.within(f"{name}: not orthonormal", gram, eye, gram.new_tensor(1e-10))

    def numbers(self) -> None:
        """Norms and spectra."""
        form, M, count = self.form, self.M, min(2 * self.form.rank, self.form.dim)
        eigenvalues = torch.linalg.eigvalsh(self.S)
        kept = eigenvalues.gather(-1, eigenvalues.abs().argsort(dim=-1, descending=True)[..., :count])
        for name, given, expected, scale in (
            ("norm2", form.norm2.sqrt(), self.norm, self.norm),
            ("trace", form.trace(), M.diagonal(dim1=-2, dim2=-1).sum(-1), self.norm),
            ("row_norms", form.row_norms(), torch.linalg.vector_norm(M, dim=-1), self.norm),
            ("column_norms", form.column_norms(), torch.linalg.vector_norm(M, dim=-2), self.norm),
            ("symmetric_eigenvalues", form.symmetric_eigenvalues(), kept.sort(descending=True).values, self.top),
            ("skew_values", form.skew_values(), torch.linalg.svdvals(self.A)[..., :count], self.top),
            ("singular_values", form.singular_values(), self.sigma[..., : min(form.rank, form.dim)], self.top),
        ):
            self.close(name, given, expected, scale)
        self.ratios(eigenvalues)
        floor = self.floor.unsqueeze(-1)
        positive, negative, zero = form.signature()
        assert torch.equal(positive, (eigenvalues > floor).sum(-1)), "signature: positive count"
        assert torch.equal(negative, (eigenvalues < -floor).sum(-1)), "signature: negative count"
        assert bool((positive + negative + zero == form.dim).all()), "signature: counts do not sum to d"

    def ratios(self, eigenvalues: Tensor) -> None:
        """Dimensionless numbers; 0 for a zero form."""
        form, unit = self.form, torch.ones_like(self.norm)
        energy = eigenvalues.square().sum(-1)
        absent = energy <= self.floor**2
        entropy = torch.special.entr(self.sigma / self.sigma.sum(-1, keepdim=True)).sum(-1)
        share, width = eigenvalues.clamp(min=0).square().sum(-1) / energy, self.sigma.shape[-1]
        for name, given, expected, zero, scale in (
            ("symmetry", form.symmetry, (self.M * self.M.mT).sum((-2, -1)) / self.norm**2, self.zero, unit),
            ("positive_share", form.positive_share, share, absent, torch.where(absent, 1.0, self.norm / energy.sqrt())),
            ("effective_rank", form.effective_rank(), entropy.exp(), self.zero, unit * width**2),
            ("stable_rank", form.stable_rank(), (self.norm / self.top) ** 2, self.zero, unit * width),
        ):
            self.within(name, given, torch.where(zero, 0.0, expected), self.of_ratios * scale)
