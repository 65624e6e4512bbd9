"""Time encodings of Bochner and Mercer: features whose inner product, the time kernel ψ, depends on the lag alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor, nn
from torch.nn.functional import softplus

from keyquery.learn.layers.time.timestamps import elapsed, spaced, spread
from keyquery.reading import Reading, digests, provenance
from keyquery.support.checks import check_choice, check_count

MIN_SHARE = 1e-30  # smallest share: the root has no gradient at 0
TURN = 2 * math.pi
FIRST = (1.0, 1e4)  # shortest and longest initial period, before `see`
POINTS = 1001  # default number of lags of a reading
SPECTRA = ("normal", "inverse_cdf", "free")
HIDDEN = 8  # units of the monotone network
STD = 0.3  # initial σ/μ: with more, frequencies differ too much between draws for later layers to train
TAIL = math.log(0.95 / 0.05)  # the logit of u = .95
SHORTEST = 1e-300  # shortest period, so that frequencies are finite


@dataclass(frozen=True, kw_only=True)
class TimeKernel(Reading, kind="time kernel"):
    """ψ at some lags, its spectrum, and with per-head weights the score term ψ_h of each head."""

    units: ClassVar[Mapping[str, str]] = {
        "lags": "time between two events, in the unit of the times",
        "values": "ψ(lag), 1 at lag 0",
        "heads": "added to the score of each head",
        "frequency": "radians per unit of time",
        "share": "of ψ(0)",
    }

    lags: list[float]
    values: list[float]
    spectrum: list[dict[str, float]]  # frequency and share of each component
    heads: list[list[float]] | None = None

    def records(self) -> list[dict[str, Any]]:
        """One row per lag."""
        heads = {f"head_{number}": row for number, row in enumerate(self.heads or [])}
        columns = {"lag": self.lags, "psi": self.values, **heads}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class TimeCode(nn.Module, ABC):
    """Φ(t) = [√w₁ cos ω₁t, √w₁ sin ω₁t, …]: ⟨Φ(t), Φ(t')⟩ = ψ(t − t') = Σᵢ wᵢ cos ωᵢ(t − t'), Σ wᵢ = 1, wᵢ ≥ 0.

    Cosine and sine share ω and w, so that ψ depends only on the lag for all parameter values. Parameters are
    dimensionless; quantities with a unit are float64 buffers, which keep their precision in any dtype. Φ(t) has `dim`
    entries, two per frequency.
    """

    base: Tensor  # the constants with a unit
    sampled = False  # whether frequencies are resampled in training

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self._held = False

    @abstractmethod
    def frequencies(self) -> Float64[Tensor, " f"]:
        """ω: those of the last `encode` in training, the fixed ones otherwise."""

    @abstractmethod
    def shares(self) -> Float64[Tensor, " f"]:
        """w, which sum to 1."""

    @abstractmethod
    def _base(self, shortest: float, longest: float) -> Tensor:
        """The constants with a unit, of frequencies between two periods."""

    @torch.no_grad()
    def see(self, times: Shaped[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"] | None = None) -> None:
        """Initialise the frequencies from data: periods from twice an inter-event time to twice a sequence length."""
        self.base.copy_(self._base(*spread(times, mask)))

    def encode(
        self,
        times: Shaped[Tensor, "*batch n"],
        origin: Shaped[Tensor, "*#batch"] | float | None = None,
        mask: Bool[Tensor, "*batch n"] | None = None,
        gain: float = 1.0,
    ) -> Float[Tensor, "*batch n dim"]:
        """gain·Φ(times − origin), in the module's dtype; 0 where `mask` is False.

        Times are float64 or integers; phases are float64, reduced to one period before the cast. The default origin is
        the first real time of each sequence; encodings are comparable between calls only with the same origin.
        """
        if self.training and not self._held:
            self._draw()
        wide = torch.promote_types(self.dtype, torch.float32)
        sizes = (gain * self.shares().clamp(min=MIN_SHARE).sqrt()).to(wide)
        turns = elapsed(times, origin, mask).unsqueeze(-1) * (self.frequencies() / TURN)
        angles = ((turns - turns.round()) * TURN).to(wide)
        code = torch.stack((angles.cos() * sizes, angles.sin() * sizes), -1).flatten(-2).to(self.dtype)
        return code if mask is None else code.where(mask.unsqueeze(-1), 0.0)

    forward = encode

    def kernel(self, lags: Shaped[Tensor, "*lags"]) -> Float64[Tensor, "*lags"]:
        """ψ(lags) in float64, with the current frequencies."""
        return (lags.double().unsqueeze(-1) * self.frequencies()).cos() @ self.shares()

    def time_kernel(self, lags: Shaped[Tensor, " lags"] | None = None) -> TimeKernel:
        """ψ over lags as a Reading with a plot. Default lags: up to half of the longest period."""
        with torch.no_grad():
            frequencies = self.frequencies()
            if lags is None:
                lowest = max(float(frequencies.abs().min()), 1e-6 * float(frequencies.abs().max()), 1e-300)
                lags = torch.linspace(0, math.pi / lowest, POINTS, dtype=torch.float64)
            lags = torch.as_tensor(lags, dtype=torch.float64, device=frequencies.device)
            if lags.ndim != 1 or len(lags) == 0 or not lags.isfinite().all():
                raise ValueError(f"lags must be finite numbers (lags,), at least one, got {lags}")
            values = self.kernel(lags)
            both = zip(frequencies.tolist(), self.shares().tolist(), strict=True)
            spectrum = [{"frequency": frequency, "share": share} for frequency, share in both]
        described = f"{type(self).__name__}({self.extra_repr()})"
        source = provenance(code=described, tensors=digests(self.state_dict()))
        return TimeKernel(lags=lags.tolist(), values=values.tolist(), spectrum=spectrum, provenance=source)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Use one draw of frequencies for all calls inside, such as queries and keys encoded separately."""
        if self.training and not self._held:
            self._draw()
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and the encodings."""
        return next(self.parameters()).dtype

    def _draw(self) -> None:
        """Resample the frequencies."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # A year in seconds does not fit into float16, nor a week into bfloat16: buffers stay float64.
        exact = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


class BochnerTime(TimeCode):
    """Bochner time encoding: random Fourier features of a translation-invariant time kernel.

        Φ(t) = (dim/2)^-½ [cos ω₁t, sin ω₁t, …],   ψ(t − t') = Φ(t)·Φ(t') = mean cos ωᵢ(t − t') → E cos ω(t − t')

    | spectrum | ω | learned |
    |---|---|---|
    | normal | μ + σε, ε ~ N(0, 1): ψ(t) → exp(−σ²t²/2) cos μt | μ and σ, relative to a base frequency |
    | inverse_cdf | g(u), u ~ U(0, 1), g a monotone network | g |
    | free | dim/2 frequencies, initially log-spaced | each of them |

    ε and u are resampled at every `encode` in training and fixed otherwise (a buffer of the state dict). They are
    sorted, so that a feature covers about the same part of the spectrum in every draw.

    Parameters
    ----------
    dim
        T, even: a cosine and a sine per frequency.
    spectrum
        One of the table. Default: "normal".
    device, dtype
        Of the parameters. Default: those of torch.

    See Also
    --------
    MercerTime : Fourier bases of several periods.
    TimeAttention : the layer that uses it.

    Examples
    --------
    >>> code = kq.BochnerTime(16).eval()
    >>> code.encode(torch.tensor([[0.0, 0.5, 3.0]], dtype=torch.float64)).shape
    torch.Size([1, 3, 16])
    """

    noise: Tensor

    def __init__(self, dim: int, spectrum: str = "normal", device: Any = None, dtype: Any = None) -> None:
        check_count("dim", dim, least=2)
        if dim % 2:
            raise ValueError(f"dim must be even, a cosine and a sine per frequency, got {dim}")
        check_choice("spectrum", spectrum, SPECTRA)
        super().__init__(dim)
        self.spectrum, self.sampled = spectrum, spectrum != "free"
        factory, count = {"device": device, "dtype": dtype}, dim // 2
        if spectrum == "normal":  # vectors of one number: `fully_shard` takes no scalars
            self.mean, self.log_std = (
                nn.Parameter(torch.full((1,), start, **factory)) for start in (1.0, math.log(STD))
            )
        elif spectrum == "inverse_cdf":
            self.network = Monotone(HIDDEN, **factory)
        else:
            self.change = nn.Parameter(torch.zeros(count, **factory))
        base = torch.ones((), dtype=torch.float64) if spectrum == "normal" else self._base(*FIRST)
        self.register_buffer("base", base.to(device))
        self.register_buffer("noise", self._sample(torch.empty(count, dtype=torch.float64, device=device)))
        self._drawn: Tensor | None = None

    def frequencies(self) -> Float64[Tensor, " f"]:
        """ω (dim/2,): those of the last `encode` in training, the fixed ones otherwise."""
        if self.spectrum == "free":
            return self.base * self.change.double().exp()
        noise = self.noise if self._drawn is None or not self.training else self._drawn.to(self.base.device)
        if self.spectrum == "normal":
            return self.base * (self.mean.double() + self.log_std.double().exp() * noise)
        middle, half = self.base
        return (middle + half * self.network(noise)).exp()

    def shares(self) -> Float64[Tensor, " f"]:
        """1/(dim/2) for every frequency."""
        return torch.full((self.dim // 2,), 2 / self.dim, dtype=torch.float64, device=self.base.device)

    def extra_repr(self) -> str:
        """For the repr of the module."""
        return f"{self.dim}, spectrum={self.spectrum!r}"

    def _base(self, shortest: float, longest: float) -> Tensor:
        """A frequency, the centre and half-width of log ω, or all frequencies."""
        if self.spectrum == "free":
            return 2 * math.pi / spaced(shortest, longest, self.dim // 2)
        middle = math.log(2 * math.pi) - math.log(shortest * longest) / 2
        if self.spectrum == "normal":
            return torch.tensor(math.exp(middle), dtype=torch.float64)
        half = max(math.log(longest / shortest) / 2, math.log(2))
        return torch.tensor((middle, half), dtype=torch.float64)

    def _draw(self) -> None:
        if self.sampled:
            self._drawn = self._sample(self.noise)

    def _sample(self, like: Tensor) -> Tensor | None:
        """ε or u, sorted: ψ is unchanged, and later layers can rely on the order."""
        if not self.sampled:
            return None
        return (torch.randn_like(like) if self.spectrum == "normal" else torch.rand_like(like)).sort().values


class Monotone(nn.Module):
    """g(u) = a·z + Σ_h w_h tanh(s_h z + b_h), z = logit u, increasing since a, w, s > 0; initially about −1 to 1."""

    def __init__(self, hidden: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.line = nn.Parameter(torch.full((1,), math.log(math.expm1(1 / TAIL)), **factory))
        self.weight = nn.Parameter(torch.full((hidden,), -4.0, **factory))
        self.slope = nn.Parameter(torch.zeros(hidden, **factory))
        self.bias = nn.Parameter(torch.linspace(-2, 2, hidden, **factory))

    def forward(self, u: Float64[Tensor, " f"]) -> Float64[Tensor, " f"]:
        """g(u), in float64."""
        z = u.clamp(1e-6, 1 - 1e-6).logit()
        line, weight, slope = (softplus(part.double()) for part in (self.line, self.weight, self.slope))
        return line * z + (slope * z.unsqueeze(-1) + self.bias.double()).tanh() @ weight


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
            raise ValueError(f"dim must be 2·degree·periods = 2·{degree}·{len(base)}, got {dim}")
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
