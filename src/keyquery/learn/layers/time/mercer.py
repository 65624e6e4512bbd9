"""Mercer time encoding: Fourier bases of several periods with learned coefficients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor, nn
from torch.nn.functional import softplus

from keyquery.learn.layers.time.base import TimeCode
from keyquery.learn.layers.time.timestamps import spaced, spread
from keyquery.support.checks import check_count, check_number

FIRST = (1.0, 1e4)  # shortest and longest initial period, before `see`
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
    learn_periods
        Default: True.

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

    base: Tensor

    def __init__(
        self,
        dim: int,
        degree: int,
        periods: int | Sequence[float],
        device: Any = None,
        dtype: Any = None,
        learn_periods: bool = True,
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
        self.change = nn.Parameter(torch.zeros(len(base), device=device, dtype=dtype), requires_grad=learn_periods)
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

    @torch.no_grad()
    def see(self, times: Shaped[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"] | None = None) -> None:
        """Initialise the periods from data, unless they were listed: from twice a gap to twice a sequence."""
        periods = spaced(*spread(times, mask), len(self.base))
        if not self.given:
            self.base.copy_(periods)

    def extra_repr(self) -> str:
        """For the repr of the module."""
        return f"{self.dim}, degree={self.degree}, periods={len(self.base)}"


def _periods(periods: Any) -> Float64[Tensor, " p"]:
    if isinstance(periods, Number):
        check_count("periods", periods, least=1)
        return spaced(*FIRST, int(periods))  # type: ignore[call-overload]
    if not isinstance(periods, Iterable) or isinstance(periods, (str, bytes)) or not (listed := list(periods)):
        raise ValueError(f"periods must be a number of periods, or a non-empty list of them, got {periods!r}")
    for period in (listed := [period.item() if isinstance(period, Tensor) else period for period in listed]):
        check_number("periods", period)
        if period < SHORTEST:
            raise ValueError(f"periods must be above 0, at least {SHORTEST:g}, got {period}")
    return torch.tensor(listed, dtype=torch.float64)
