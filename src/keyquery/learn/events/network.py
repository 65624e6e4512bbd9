"""The network of an EventModel: the type of the next event, the distribution of the time until it, and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from keyquery.layers import Block
from keyquery.learn.events.windows import Batch, Windows
from keyquery.learn.layers import BochnerTime, MercerTime, TimeAttention
from keyquery.learn.layers.time import TimeCode
from keyquery.learn.series.network import sinusoids
from keyquery.support.progress import Progress, silent

TIMES = ("mercer", "bochner", "positions")
COMPONENTS = 8  # of the mixture
DEGREE, PERIODS = 2, 6  # of Mercer's Fourier series
KNOTS = 17  # of the piecewise-linear function of a gap, at quantiles of the data
APART = 0.01  # least distance of knots, in log gaps
SEEN = 1000  # windows that time encodings are initialised from
MAX_LOG_RATIO = 20.0  # log of how many times longer than the silence so far a gap may be
MIN_SPREAD = 0.05  # least standard deviation of log gaps: no spikes at frequent gaps


class Mixture(NamedTuple):
    """Gaps g with density Σ_k w_k LogNormal(g; mean_k, spread_k), w = softmax(weights).

    Gaps at or below `floor` count with the distribution function: simultaneous events are common, and have no density.
    """

    weights: Float[Tensor, "*batch k"]
    mean: Float[Tensor, "*batch k"]
    spread: Float[Tensor, "*batch k"]
    floor: float

    @classmethod
    def of(cls, raw: Float[Tensor, "*batch parameters"], floor: float) -> Mixture:
        """From the 3 k outputs of a linear map."""
        weights, mean, spread = raw.float().chunk(3, -1)
        return cls(weights, mean, MIN_SPREAD + softplus(spread), floor)

    def at(self, chosen: Bool[Tensor, "*batch"]) -> Mixture:
        """A subset of the distributions, (chosen, k)."""
        return Mixture(self.weights[chosen], self.mean[chosen], self.spread[chosen], self.floor)

    @classmethod
    def join(cls, parts: Sequence[Mixture]) -> Mixture:
        """Concatenated, (all, k)."""
        weights, mean, spread = (torch.cat(columns) for columns in list(zip(*parts, strict=True))[:3])
        return cls(weights, mean, spread, parts[0].floor)

    def log_density(self, gaps: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Log-likelihood of gaps: of the density, and of the probability of those at or below the floor."""
        logs = gaps.double().clamp(min=self.floor).log().to(self.mean.dtype).unsqueeze(-1)
        z = (logs - self.mean) / self.spread
        density = -0.5 * z.square() - self.spread.log() - 0.5 * math.log(2 * math.pi) - logs
        terms = density.where((gaps > self.floor).unsqueeze(-1), torch.special.log_ndtr(z))
        return (self.weights.log_softmax(-1) + terms).logsumexp(-1)

    def log_survival(self, gaps: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Log-probability that the gap is longer than `gaps`; 0 below the floor, where gaps are not distinguished."""
        return self._beyond(gaps.double().clamp(min=self.floor).log()).where(gaps > self.floor, 0.0)

    def _beyond(self, logs: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
        """Log-probability that the logarithm of the gap is above `logs`."""
        longer = torch.special.log_ndtr((self.mean.double() - logs.unsqueeze(-1)) / self.spread.double())
        return (self.weights.double().log_softmax(-1) + longer).logsumexp(-1)

    def average(self, after: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The expected gap of those longer than `after`, of all if that is not above the floor.

        Given g > s it is Σ w exp(mean + spread²/2) Φ((mean + spread² − ln s)/spread) / P(g > s).
        """
        mean, spread = self.mean.double(), self.spread.double()
        terms = self.weights.double().log_softmax(-1) + mean + spread.square() / 2
        logs = after.double().clamp(min=self.floor).log().unsqueeze(-1)
        beyond = terms + torch.special.log_ndtr((mean + spread.square() - logs) / spread)
        known = (beyond.logsumexp(-1) - self.log_survival(after)).exp()
        return known.where(after > self.floor, terms.logsumexp(-1).exp())

    def quantile(self, share: float = 0.5, after: Float[Tensor, "*batch"] | None = None) -> Float[Tensor, "*batch"]:
        """Quantile of the gaps, or of those longer than `after`, by bisection of the logarithm; 0 if at the floor."""
        after = torch.zeros_like(self.mean[..., 0]) if after is None else after
        reach, least = 8 * self.spread.double(), after.double().clamp(min=self.floor).log()
        low = torch.minimum((self.mean - reach).amin(-1), least)
        high = torch.maximum((self.mean + reach).amax(-1), least + MAX_LOG_RATIO)
        left = math.log1p(-share) + self.log_survival(after)
        for _ in range(70):
            middle = (low + high) / 2
            less = self._beyond(middle) > left
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
        return logs.exp().where(logs.exp() > self.floor, 0.0)


class EventNetwork(nn.Module):
    """Predictions after each event of a window: logits of types (batch, n, types), and a Mixture of gaps (batch, n).

    With `targeted`, the next type is predicted by a separate query token at the time of the next event, which sees that
    time and the past and is seen by no other token. `since` forces the input of the time since the previous event on or
    off, `hidden` is the width of the MLPs, both for comparisons; `ends` adds a logit that no event follows.
    """

    def __init__(
        self,
        types: int,
        width: int,
        depth: int,
        heads: int,
        time: str,
        how: str = "concatenated",
        dropout: float = 0.0,
        targeted: bool = False,
        calendar: bool = False,
        floor: float = 1e-3,
        since: bool | None = None,
        hidden: int | None = None,
        inputs: int = 0,
        ends: bool = False,
    ) -> None:
        super().__init__()
        self.calendar = calendar
        self.timed, self.floor = time != "positions", floor
        self.types = nn.Embedding(types, width)
        self.now = nn.Parameter(torch.randn(width)) if targeted else None
        self.since = Since(width, floor) if (self.timed if since is None else since) else None
        self.blocks = nn.ModuleList(_block(width, heads, time, how, dropout, hidden) for _ in range(depth))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.next, self.gap = nn.Linear(width, types + ends), nn.Linear(width, 3 * COMPONENTS)
        self.inputs = nn.Linear(inputs, width, bias=False) if inputs else None
        if self.inputs is not None:
            nn.init.zeros_(self.inputs.weight)  # an indicator that never occurs in training stays without effect

    def forward(
        self,
        types: Int[Tensor, "batch n"],
        times: Float64[Tensor, "batch n"],
        real: Bool[Tensor, "batch n"],
        next_times: Float64[Tensor, "batch n"] | None = None,
        inputs: Float[Tensor, "batch n k"] | None = None,
    ) -> tuple[Float[Tensor, "batch n types"], Mixture]:
        """Logits of the next type and the distribution of the gap; `next_times` is needed if targeted."""
        n, width = types.shape[1], self.types.embedding_dim
        positions = sinusoids(n + 1, width, types.device)
        kinds = self._embedded(types)
        if self.inputs is not None and inputs is not None:
            kinds = kinds + self.inputs(inputs)
        x = kinds + positions[:n]
        if self.since is not None:
            x = x + self.since(times.diff(dim=1, prepend=times[:, :1]))
        options: dict[str, Any] = {"mask": real, "is_causal": True}
        origin = torch.zeros_like(times[:, 0]) if self.calendar else times[:, 0]
        if self.now is not None:
            assert next_times is not None
            assert self.since is not None
            moments = self.now + kinds + positions[1:] + self.since(next_times - times)
            x = torch.cat((x, moments), 1)
            times = torch.cat((times, next_times), 1)
            options = {"mask": _targeted(real)}
        if self.timed:
            options |= {"times": times, "origin": origin}
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, **options)
        x = self.dropout(self.norm(x))
        return self.next(x[:, -n:]), Mixture.of(self.gap(x[:, :n]), self.floor)

    def _embedded(self, types: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n width"]:
        """Embeddings of types; −1, a type that did not occur in training, has the mean of all."""
        return self.types(types.clamp(min=0)).where((types >= 0).unsqueeze(-1), self.types.weight.mean(0))

    @torch.no_grad()
    def begin(
        self, counts: Float64[np.ndarray, " types"], gaps: Float64[np.ndarray, " pairs"], windows: Windows
    ) -> None:
        """Initialise output biases and time encodings from the frequencies of types and gaps in the data."""
        self.next.bias.copy_(torch.from_numpy(np.log((counts + 1) / (counts + 1).sum())))  # with ends, counted last
        tied = gaps <= self.floor
        spread = max(float(np.log(gaps[~tied]).std()) / 2, 0.1)
        logs = np.where(tied, np.log(self.floor) - 3 * spread, np.log(np.maximum(gaps, self.floor)))
        weights, means, spreads = self.gap.bias.chunk(3)
        weights.zero_()
        means.copy_(torch.from_numpy(np.quantile(logs, (np.arange(COMPONENTS) + 0.5) / COMPONENTS)))
        spreads.fill_(math.log(math.expm1(spread)))
        self.gap.weight.mul_(0.1)
        batch = windows.take(range(0, len(windows.starts), -(-len(windows.starts) // SEEN)))
        if self.since is not None:
            self.since.begin(gaps)
        for part in self.modules():
            if isinstance(part, TimeCode):
                part.see(torch.cat((batch.times, batch.next_times), 1), batch.real.repeat(1, 2))


class Since(nn.Module):
    """A learned function of the time g since another event, (…, width), piecewise linear in log g.

    Its knots are quantiles of the log gaps of the data, which span many scales that a few sines do not resolve.
    """

    knots: Tensor

    def __init__(self, width: int, floor: float = 1e-3) -> None:
        super().__init__()
        self.floor = floor
        self.register_buffer("knots", torch.linspace(math.log(floor), -math.log(floor), KNOTS))
        self.map = nn.Linear(KNOTS - 1, width)

    def forward(self, spans: Float64[Tensor, "batch n"]) -> Float[Tensor, "batch n width"]:
        """Spans to vectors."""
        logs = spans.clamp(min=self.floor).log().to(self.knots.dtype).unsqueeze(-1)
        return self.map(((logs - self.knots[:-1]) / self.knots.diff()).clamp(0, 1))

    @torch.no_grad()
    def begin(self, gaps: Float64[np.ndarray, " pairs"]) -> None:
        """Set the knots to quantiles of the gaps."""
        quantiles = np.quantile(np.log(np.maximum(gaps, self.floor)), np.linspace(0, 1, KNOTS))
        # If many gaps are equal, quantiles coincide.
        self.knots.copy_(torch.from_numpy(quantiles + APART * np.arange(KNOTS)))


def _block(width: int, heads: int, time: str, how: str, dropout: float, hidden: int | None) -> Block:
    block = Block(width, heads, hidden, dropout=dropout)
    if time != "positions":
        dim = 2 * DEGREE * PERIODS
        code = MercerTime(dim, DEGREE, PERIODS) if time == "mercer" else BochnerTime(dim, "free")
        block.attention = TimeAttention(width, heads, code, how=how, dropout=dropout)
    return block


def _targeted(real: Bool[Tensor, "batch n"]) -> Bool[Tensor, "batch m m"]:
    """Attention mask of n events followed by n query tokens: events see the past, a query token the past and itself."""
    n = real.shape[1]
    past = torch.ones(n, n, dtype=torch.bool, device=real.device).tril()
    seen = past & real.unsqueeze(1)
    itself = torch.eye(n, dtype=torch.bool, device=real.device).expand_as(seen)
    return torch.cat((torch.cat((seen, torch.zeros_like(seen)), 2), torch.cat((seen, itself), 2)), 1)


def losses(model: nn.Module, batch: Batch, types: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Per predicted event of a known type: cross-entropy, negative log-likelihood of its gap, and whether it is right.

    All (count,), in nats; cross-entropies include that an event follows at all, unless `types` is their number.
    """
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times, batch.inputs)
    chosen = batch.predicted
    logits, target = logits[chosen][:, :types].float(), batch.next_types[chosen]
    kinds = cross_entropy(logits, target, reduction="none")
    return kinds, -mixture.at(chosen).log_density(batch.gaps[chosen]), logits.argmax(-1) == target


@torch.no_grad()
def judged(
    model: nn.Module, windows: Windows, size: int, types: int | None = None, progress: Progress = silent
) -> dict[str, float]:
    """Weighted means over all predicted events: accuracy, and negative log-likelihoods of type and gap."""
    model.eval()
    sums, count = torch.zeros(3, dtype=torch.float64), 0.0
    for batch in progress(windows.batches(size), "evaluating", -(-len(windows.starts) // size)):
        kind, gap, right = losses(model, batch, types)
        weight = torch.ones_like(kind).double() if batch.weights is None else batch.weights[batch.predicted]
        sums += (torch.stack((right, kind, gap)).double() * weight).sum(1).cpu()
        count += float(weight.sum())
    return dict(zip(("accuracy", "nll_type", "nll_gap"), (sums / count).tolist(), strict=True))


def following(model: nn.Module, batch: Batch) -> tuple[Tensor, Mixture]:
    """Logits and gap distribution after the one counted event of each row."""
    logits, mixture = model(batch.types, batch.times, batch.real, batch.next_times, batch.inputs)
    return logits[batch.counted].float(), mixture.at(batch.counted)


def log_ends(logits: Tensor, types: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities that no event follows, −∞ if the model does not know ends, and that one does."""
    logs = logits.double().log_softmax(-1)
    return logs[..., types:].logsumexp(-1), logs[..., :types].logsumexp(-1)


class Lasts(NamedTuple):
    """The last events of groups that have ended, or that were observed for a span without another event (censoring)."""

    windows: Windows
    spans: Float64[Tensor, " groups"]  # in units of the median gap
    ended: Bool[Tensor, " groups"]
    weights: Float64[Tensor, " groups"]
    owners: Int[np.ndarray, " groups"]
    types: int  # number of event types

    def of(self, chosen: Bool[np.ndarray, " groups"]) -> Lasts:
        """Some of the groups."""
        which = torch.from_numpy(chosen).to(self.spans.device)
        spans, ended, weights = self.spans[which], self.ended[which], self.weights[which]
        return Lasts(self.windows.of(which), spans, ended, weights, self.owners[chosen], self.types)

    def losses(self, model: nn.Module, index: Tensor) -> Tensor:
        """Weighted −log P(end) of groups that have ended, and −log P(no event within the span) of others, in nats."""
        batch = self.windows.take(index)
        batch = batch._replace(next_times=batch.times)  # what follows is another group's
        logits, mixture = following(model, batch)
        rows = index.to(self.spans.device)
        end, more = log_ends(logits, self.types)
        silence = torch.logaddexp(end, more + mixture.log_survival(self.spans[rows]))
        return -(end.where(self.ended[rows], silence) * self.weights[rows]).float()

    @torch.no_grad()
    def judged(self, model: nn.Module, size: int) -> float:
        """The mean over all groups."""
        model.eval()
        parts = torch.arange(len(self.spans)).split(size)
        return float(torch.cat([self.losses(model, part) for part in parts]).double().mean())
