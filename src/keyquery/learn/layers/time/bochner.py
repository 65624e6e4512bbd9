"""Bochner time encoding: cosines and sines of frequencies sampled from a learned spectrum."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn.functional import softplus

from keyquery.learn.layers.time.base import FIRST, TimeCode
from keyquery.learn.layers.time.timestamps import spaced
from keyquery.support.checks import check_choice, check_count

SPECTRA = ("normal", "inverse_cdf", "free")
HIDDEN = 8  # units of the monotone network
STD = 0.3  # initial σ/μ: with more, frequencies differ too much between draws for later layers to train
TAIL = math.log(0.95 / 0.05)  # the logit of u = .95


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
