"""Mercer time encoding: Fourier bases of several periods with learned coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn.functional import softplus

from keyquery.learn.layers.time.base import FIRST, TimeCode
from keyquery.learn.layers.time.timestamps import spaced
from keyquery.support.checks import check_count

SHORTEST = 1e-300  # shortest period, so that frequencies are finite


class MercerTime(TimeCode):
    """Mercer time encoding: Fourier bases of several periods with learned coefficients.

        Φ(t) = [√c_pj cos(2πjt/p), √c_pj sin(2πjt/p)] for j = 1 … degree and every period p
        ψ(t − t') = Φ(t)·Φ(t') = Σ c_pj cos(2πj(t − t')/p)

    The functions are the eigenfunctions of a kernel of period p, and c ≥ 0 its eigenvalues (Mercer), which sum to 1.
    The constant function is left out, since it adds the same to every score.

    Parameters
    ----------
    dim
        T = 2·degree·(number of periods).
    degree
        Harmonics per period.
    periods
        Number of periods, log-spaced from 1 to 10⁴ until `see` fits them to data; or a list of initial periods.
    device, dtype
        Of the parameters. Default: those of torch.

    See Also
    --------
    BochnerTime : frequencies sampled from a learned spectrum.
    TimeAttention : the layer that uses it.

    Examples
    --------
    >>> code = kq.MercerTime(20, degree=5, periods=[1.0, 7.0])
    >>> code.encode(torch.tensor([[0.0, 0.5, 3.0]], dtype=torch.float64)).shape
    torch.Size([1, 3, 20])
    """

    def __init__(
        self, dim: int, degree: int, periods: int | Sequence[float], device: Any = None, dtype: Any = None
    ) -> None:
        check_count("dim", dim, least=2)
        check_count("degree", degree, least=1)
        base = _periods(periods)
        if dim != 2 * degree * len(base):
            raise ValueError(
                f"dim must be 2·degree·periods = 2·{degree}·{len(base)} = {2 * degree * len(base)}, a cosine and a "
                f"sine per degree and period, got {dim}"
            )
        super().__init__(dim)
        self.degree, self.given = degree, not isinstance(periods, Number)
        self.change = nn.Parameter(torch.zeros(len(base), device=device, dtype=dtype))
        self.raw = nn.Parameter(torch.zeros(len(base), degree, device=device, dtype=dtype))
        self.register_buffer("base", base.to(device))

    def periods(self) -> Float64[Tensor, " p"]:
        """The learned periods, in units of time."""
        return self.base * self.change.double().exp()

    def coefficients(self) -> Float64[Tensor, "p degree"]:
        """c, which sum to 1."""
        positive = softplus(self.raw.double())
        return positive / positive.sum()

    def frequencies(self) -> Float64[Tensor, " f"]:
        """2πj/p, period by period."""
        harmonics = torch.arange(1, self.degree + 1, dtype=torch.float64, device=self.base.device)
        return (2 * math.pi * harmonics / self.periods().unsqueeze(-1)).flatten()

    def shares(self) -> Float64[Tensor, " f"]:
        """The coefficients, in the order of the frequencies."""
        return self.coefficients().flatten()

    def _base(self, shortest: float, longest: float) -> Tensor:
        """The initial periods; those that were listed stay."""
        return self.base if self.given else spaced(shortest, longest, len(self.base))

    def extra_repr(self) -> str:
        """For the repr of the module."""
        return f"{self.dim}, degree={self.degree}, periods={len(self.base)}"


def _periods(periods: Any) -> Float64[Tensor, " p"]:
    if isinstance(periods, Number):
        check_count("periods", periods)
        return spaced(*FIRST, int(periods))  # type: ignore[call-overload]
    listed = torch.as_tensor(periods, dtype=torch.float64)
    if listed.ndim != 1 or len(listed) == 0 or not (listed.isfinite() & (listed >= SHORTEST)).all():
        raise ValueError(f"periods must be a count, or a list of numbers, each at least {SHORTEST:g}, got {periods}")
    return listed
