"""Log-normal mixtures: the distribution of the time to the next event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

NARROWEST = 0.05  # least standard deviation of log gaps: no spikes at frequent gaps


class Mixture(NamedTuple):
    """Gaps g with density Σ_k w_k LogNormal(g; mean_k, spread_k), w = softmax(weights).

    Gaps at or below `floor`, including 0, are left-censored: they count with the distribution function at the floor,
    all others with the density. A log-normal has no density at 0, and simultaneous events are common.
    """

    weights: Float[Tensor, "*batch k"]
    mean: Float[Tensor, "*batch k"]
    spread: Float[Tensor, "*batch k"]
    floor: float

    @classmethod
    def of(cls, raw: Float[Tensor, "*batch parameters"], floor: float) -> Mixture:
        """From the 3 k outputs of a linear map.

        >>> Mixture.of(torch.zeros(2, 12), floor=1e-3).mean.shape
        torch.Size([2, 4])
        """
        weights, mean, spread = raw.float().chunk(3, -1)
        return cls(weights, mean, NARROWEST + softplus(spread), floor)

    def at(self, chosen: Bool[Tensor, "*batch"]) -> Mixture:
        """A subset of the distributions, (chosen, k)."""
        return Mixture(self.weights[chosen], self.mean[chosen], self.spread[chosen], self.floor)

    @classmethod
    def join(cls, parts: Sequence[Mixture]) -> Mixture:
        """Concatenated, (all, k)."""
        weights, mean, spread = (torch.cat(each) for each in list(zip(*parts, strict=True))[:3])
        return cls(weights, mean, spread, parts[0].floor)

    def log_density(self, gaps: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Log-likelihood of gaps: of the density, and of the probability of those at or below the floor.

        >>> one = Mixture(torch.zeros(1), torch.zeros(1), torch.ones(1), floor=0.01)
        >>> one.log_density(torch.tensor([1.0])[0])
        tensor(-0.9189)
        """
        logs = gaps.double().clamp(min=self.floor).log().to(self.mean.dtype).unsqueeze(-1)
        z = (logs - self.mean) / self.spread
        density = -0.5 * z.square() - self.spread.log() - 0.5 * math.log(2 * math.pi) - logs
        each = density.where((gaps > self.floor).unsqueeze(-1), torch.special.log_ndtr(z))
        return (self.weights.log_softmax(-1) + each).logsumexp(-1)

    def average(self) -> Float[Tensor, "*batch"]:
        """The expected gap, Σ w exp(mean + spread²/2); sensitive to long tails."""
        return (self.weights.softmax(-1) * (self.mean + self.spread.square() / 2).exp()).sum(-1)

    def quantile(self, share: float = 0.5) -> Float[Tensor, "*batch"]:
        """Quantile of the gaps, by bisection in the logarithm; 0 if it is at the floor.

        >>> round(float(Mixture(torch.zeros(1), torch.ones(1), torch.ones(1), 0.01).quantile()), 4)
        2.7183
        """
        reach = 8 * self.spread
        low, high = (self.mean - reach).amin(-1), (self.mean + reach).amax(-1)
        for _ in range(60):
            middle = (low + high) / 2
            z = (middle.unsqueeze(-1) - self.mean) / self.spread
            less = (self.weights.softmax(-1) * torch.special.ndtr(z)).sum(-1) < share
            low, high = middle.where(less, low), high.where(less, middle)
        gaps = high.exp()
        return gaps.where(gaps > self.floor, 0.0)

    def draw(self, generator: torch.Generator) -> Float[Tensor, "*batch"]:
        """One sample per distribution; 0 if it is at or below the floor."""
        shape, k = self.mean.shape[:-1], self.mean.shape[-1]
        weights = self.weights.softmax(-1).reshape(-1, k).cpu()
        chosen = torch.multinomial(weights, 1, generator=generator).reshape(*shape, 1).to(self.mean.device)
        noise = torch.randn(shape, generator=generator).to(self.mean.device)
        logs = self.mean.gather(-1, chosen).squeeze(-1) + noise * self.spread.gather(-1, chosen).squeeze(-1)
        gaps = logs.exp()
        return gaps.where(gaps > self.floor, 0.0)
