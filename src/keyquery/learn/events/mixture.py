"""Log-normal mixtures: the distribution of the time to the next event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

FARTHEST = 20.0  # log of how many times longer than the silence so far a gap may be
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
        """From the 3 k outputs of a linear map."""
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
        """Log-likelihood of gaps: of the density, and of the probability of those at or below the floor."""
        logs = gaps.double().clamp(min=self.floor).log().to(self.mean.dtype).unsqueeze(-1)
        z = (logs - self.mean) / self.spread
        density = -0.5 * z.square() - self.spread.log() - 0.5 * math.log(2 * math.pi) - logs
        each = density.where((gaps > self.floor).unsqueeze(-1), torch.special.log_ndtr(z))
        return (self.weights.log_softmax(-1) + each).logsumexp(-1)

    def log_survival(self, gaps: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Log-probability that the gap is longer than `gaps`; 0 below the floor, where gaps are not distinguished."""
        logs = gaps.double().clamp(min=self.floor).log().unsqueeze(-1)
        longer = torch.special.log_ndtr((self.mean.double() - logs) / self.spread.double())
        survival = (self.weights.double().log_softmax(-1) + longer).logsumexp(-1)
        return survival.where(gaps > self.floor, 0.0)

    def average(self, after: Float[Tensor, "*batch"] | None = None) -> Float[Tensor, "*batch"]:
        """The expected gap, Σ w exp(mean + spread²/2), or that of gaps longer than `after`; sensitive to long tails.

        Given g > s it is Σ w exp(mean + spread²/2) Φ((mean + spread² − ln s)/spread) / P(g > s).
        """
        mean, spread = self.mean.double(), self.spread.double()
        each = self.weights.double().log_softmax(-1) + mean + spread.square() / 2
        if after is None:
            return each.logsumexp(-1).exp()
        logs = after.double().clamp(min=self.floor).log().unsqueeze(-1)
        beyond = each + torch.special.log_ndtr((mean + spread.square() - logs) / spread)
        known = (beyond.logsumexp(-1) - self.log_survival(after)).exp()
        return known.where(after > self.floor, each.logsumexp(-1).exp())

    def quantile(self, share: float = 0.5, after: Float[Tensor, "*batch"] | None = None) -> Float[Tensor, "*batch"]:
        """Quantile of the gaps, or of those longer than `after`, by bisection of the logarithm; 0 if at the floor."""
        after = torch.zeros_like(self.mean[..., 0]) if after is None else after
        reach, least = 8 * self.spread.double(), after.double().clamp(min=self.floor).log()
        low = torch.minimum((self.mean - reach).amin(-1), least)
        high = torch.maximum((self.mean + reach).amax(-1), least + FARTHEST)
        left = math.log1p(-share) + self.log_survival(after)
        weights = self.weights.double().log_softmax(-1)
        for _ in range(70):
            middle = (low + high) / 2
            z = (self.mean.double() - middle.unsqueeze(-1)) / self.spread.double()
            less = (weights + torch.special.log_ndtr(z)).logsumexp(-1) > left
            low, high = middle.where(less, low), high.where(less, middle)
        gaps = high.exp()
        return torch.maximum(gaps.where(gaps > self.floor, 0.0), after.double())

    def draw(self, generator: torch.Generator) -> Float[Tensor, "*batch"]:
        """One sample per distribution; 0 if it is at or below the floor."""
        shape, k = self.mean.shape[:-1], self.mean.shape[-1]
        weights = self.weights.softmax(-1).reshape(-1, k).cpu()
        chosen = torch.multinomial(weights, 1, generator=generator).reshape(*shape, 1).to(self.mean.device)
        noise = torch.randn(shape, generator=generator).to(self.mean.device)
        logs = self.mean.gather(-1, chosen).squeeze(-1) + noise * self.spread.gather(-1, chosen).squeeze(-1)
        gaps = logs.exp()
        return gaps.where(gaps > self.floor, 0.0)
