"""Random features of time series: pooled convolutions with fixed kernels, and which of competing kernels win."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from keyquery.learn.inputs.sequences import Padded
from keyquery.support.progress import Progress, silent

LENGTH, TWOS = 9, 3  # weights of a kernel, and how many of them are 2
KERNELS = torch.full((84, LENGTH), -1.0)  # six values of −1, three of 2: their sum is 0
for _row, _twos in zip(KERNELS, combinations(range(LENGTH), TWOS), strict=True):
    _row[list(_twos)] = 2.0
DILATIONS = 16  # at most, on an exponential scale
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are evenly spread
TOGETHER = 2**19  # values of a convolution per batch: more do not fit into the caches of a CPU
SERIES = 8  # per batch, at least: reductions over time are faster if several lie side by side
GROUP = 8  # kernels that compete
GROUPS = 32  # per dilation, for series and again for their differences
CHUNK = 8  # groups at a time: more do not fit into the caches of a CPU
TIE = 1e-5  # convolutions that differ by less are equal: where a series is constant, all kernels win
OUTSIDE = torch.finfo(torch.float32).min  # below every value, and finite, so that it vanishes if multiplied by 0


class Convolutions(nn.Module):
    """Features of series (batch, n, dims): convolutions with fixed kernels and random dilations, pooled over time.

    Kernels, dilations, thresholds and zero-padding are those of MiniRocket (Dempster, Schmidt and Webb, KDD 2021). Half
    the features are those of first differences, and values above a threshold are pooled to their share and mean, as in
    MultiRocket (Tan et al., 2022). In place of its longest stretch above a threshold, every second kernel has the
    largest values sustained for 1, 4, 16 … steps, which hold it for all thresholds at once. A kernel reads a random
    subset of the dims.
    """

    def __init__(self, dims: int, plans: Sequence[Sequence[Sequence[int]]], levels: int) -> None:
        super().__init__()
        self.plans = plans  # for series and differences: (dilation, thresholds per kernel) of each dilation
        self.levels = levels  # of sustained values
        # For each dilation: whether it is one of the differences, the dilation, and the thresholds per kernel.
        self.steps = [(view, *pair) for view, plan in enumerate(plans) for pair in plan]
        counts = [count for _view, _dilation, count in self.steps]
        self.thresholds = nn.ParameterList(_fixed(torch.zeros(len(KERNELS), count)) for count in counts)
        self.dims = nn.ParameterList(_fixed(torch.ones(len(KERNELS), dims)) for _ in counts)

    @classmethod
    def fitted(cls, series: Padded, per_kernel: int, generator: np.random.Generator) -> Convolutions:
        """`per_kernel` thresholds for each kernel and each view, at quantiles of these series."""
        views = [series, differences(series)]
        plans = [plan(int(view.real.sum(1).max()), per_kernel) for view in views]
        module, used = cls(series.values.shape[-1], plans, level_count(int(series.real.sum(1).max()))), 0
        module.to(series.values.device)
        for (view, dilation, count), dims, thresholds in zip(module.steps, module.dims, module.thresholds, strict=True):
            dims.copy_(torch.from_numpy(subsets(len(KERNELS), dims.shape[1], generator)))
            drawn = torch.from_numpy(generator.integers(len(series.real), size=len(KERNELS)))
            shares = torch.arange(1, thresholds.numel() + 1, dtype=torch.float64) + used
            shares = (shares * GOLDEN % 1).view(-1, count).to(dims.device)
            thresholds.copy_(quantiles(views[view].take(drawn.to(dims.device)), weights(dims), dilation, shares))
            used += thresholds.numel()
        return module

    @property
    def width(self) -> int:
        """Number of features."""
        return len(KERNELS) // 2 * sum(4 * count + self.levels for _view, _dilation, count in self.steps)

    @torch.no_grad()
    def forward(self, series: Padded, progress: Progress = silent) -> Float[Tensor, "batch features"]:
        """The features of all series, in batches."""
        return batched(self._features, series, len(KERNELS), "convolutions", progress)

    def _features(self, series: Padded) -> Float[Tensor, "batch features"]:
        features, views = list[Tensor](), (series, differences(series))
        for number, (which, dilation, _count) in enumerate(self.steps):
            view = views[which]
            values = convolved(view.values, weights(self.dims[number]), dilation)
            for half in (0, 1):
                inside = view.real if (half + number) % 2 == 0 else windows_inside(view.real, dilation)
                shown = within(values[half::2], inside)
                features += pooled(shown, inside.sum(1), self.thresholds[number][half::2])
                features += sustained(shown, self.levels) if half else []
        return torch.cat(features).T


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def batched(
    features: Callable[[Padded], Tensor], series: Padded, kernels: int, description: str, progress: Progress
) -> Float[Tensor, "batch features"]:
    """Features of all series, in batches whose convolutions fit into the caches of a CPU."""
    size = max(TOGETHER // (kernels * series.values.shape[1]), SERIES)
    count = -(-len(series.values) // size)
    return torch.cat([features(part) for part in progress(series.batches(size), description, count)])


def level_count(length: int) -> int:
    """Number of sustained values for series of this length: windows of 1, 4, 16 … steps, at most half the series."""
    return 1 + int(np.log2(max(length / 2, 1)) // 2)


def plan(length: int, per_kernel: int) -> list[list[int]]:
    """Dilations of series of this length, and the number of thresholds of each, `per_kernel` in all."""
    most = max((length - 1) / (LENGTH - 1), 1.0)
    steps = np.floor(2 ** np.linspace(0, np.log2(most), min(DILATIONS, per_kernel))).astype(int)
    dilations, counts = np.unique(steps, return_counts=True)
    shared = np.diff(np.round(np.concatenate(([0], counts.cumsum())) * per_kernel / counts.sum()).astype(int))
    return [[int(dilation), int(count)] for dilation, count in zip(dilations, shared, strict=True) if count]


def subsets(count: int, dims: int, generator: np.random.Generator) -> Float[np.ndarray, "count dims"]:
    """1 for the dims that each of `count` kernels reads: at most nine, uniformly distributed on a log scale."""
    chosen = np.zeros((count, dims), dtype=np.float32)
    for row in chosen:
        size = int(2 ** generator.uniform(0, np.log2(min(dims, LENGTH) + 1)))
        row[generator.choice(dims, size, replace=False)] = 1
    return chosen


def weights(dims: Float[Tensor, "84 dims"]) -> Float[Tensor, "84 weights"]:
    """Weights (84, 9 · dims) of all kernels."""
    return (KERNELS.to(dims).unsqueeze(-1) * dims.unsqueeze(1)).flatten(1)


def shifted(values: Float[Tensor, "batch n dims"], dilation: int) -> Float[Tensor, "weights n batch"]:
    """What each weight of a dilated kernel meets, in zero-padded series; time before series, for fast pooling."""
    n, reach = values.shape[1], dilation * (LENGTH // 2)
    longer = pad(values.permute(2, 1, 0), (0, 0, reach, reach))
    return torch.stack([longer[:, index * dilation :][:, :n] for index in range(LENGTH)]).flatten(0, 1)


def quantiles(
    series: Padded, kernels: Float[Tensor, "84 weights"], dilation: int, levels: Float[Tensor, "84 count"]
) -> Float[Tensor, "84 count"]:
    """Quantiles of the convolution of series i with kernel i."""
    values = torch.einsum("kw,wnk->kn", kernels, shifted(series.values, dilation))
    ordered = values.masked_fill(~series.real, torch.inf).sort(1).values
    return ordered.gather(1, (levels * (series.real.sum(1, keepdim=True) - 1)).long())


def convolved(
    values: Float[Tensor, "batch n dims"], kernels: Float[Tensor, "kernels weights"], dilation: int
) -> Float[Tensor, "kernels n batch"]:
    """Dilated convolutions of zero-padded series: one product of matrices."""
    return (kernels @ shifted(values, dilation).flatten(1)).view(len(kernels), -1, len(values))


def windows_inside(real: Bool[Tensor, "batch n"], dilation: int) -> Bool[Tensor, "batch n"]:
    """Time steps whose window of a dilated kernel lies inside the series; all, if none does."""
    reach, length = dilation * (LENGTH // 2), real.sum(1, keepdim=True)
    step = torch.arange(real.shape[1], device=real.device)
    inside = (step >= reach) & (step < length - reach)
    return torch.where(length > 2 * reach, inside, real)


def within(
    values: Float[Tensor, "kernels n batch"], inside: Bool[Tensor, "batch n"]
) -> Float[Tensor, "kernels m batch"]:
    """Values inside: a slice if all series agree, else `OUTSIDE` marks what is outside."""
    start, count = int(inside[0].to(torch.uint8).argmax()), int(inside[0].sum())
    if bool((inside == inside[0]).all()) and bool(inside[0, start : start + count].all()):
        return values[:, start : start + count]
    return values.masked_fill(~inside.T, OUTSIDE)


def differences(series: Padded) -> Padded:
    """First differences; a series of one time step has the difference 0."""
    values, real = series
    if values.shape[1] == 1:
        return Padded(torch.zeros_like(values), real)
    inside = real[:, 1:].clone()
    inside[:, 0] |= ~inside.any(1)
    steps = values.diff(dim=1).where(real[:, 1:, None], 0.0)
    return Padded(steps, inside)


def pooled(
    values: Float[Tensor, "kernels n batch"], count: Int[Tensor, " batch"], thresholds: Float[Tensor, "kernels count"]
) -> list[Float[Tensor, "kernels batch"]]:
    """For each threshold, the share of the `count` values of each series that are above it, and their mean or 0."""
    features, above = list[Tensor](), torch.empty_like(values)
    share = 1 / count.clamp(min=1).to(values)
    for threshold in thresholds.T[..., None, None]:
        number = torch.gt(values, threshold, out=above).sum(1)
        total = above.mul_(values).sum(1)
        features += [number * share, total / number.clamp(min=1)]
    return features


def sustained(values: Float[Tensor, "kernels n batch"], levels: int) -> list[Float[Tensor, "kernels batch"]]:
    """The largest value that is sustained for 1, 4, 16 … steps: the maximum over windows of their minimum.

    A window longer than the series counts as the next shorter one.
    """
    features, size = [values.amax(1)], 1
    for _level in range(1, levels):
        if values.shape[1] <= 3 * size:
            features.append(features[-1])
            continue
        for step in (size, 2 * size):
            values = torch.minimum(values[:, step:], values[:, :-step])
        size *= 4
        largest = values.amax(1)
        features.append(torch.where(largest > OUTSIDE, largest, features[-1]))
    return features


class Competing(nn.Module):
    """Features of series (batch, n, dims): how often, and how strongly, each kernel wins against those of its group.

    After Hydra (Dempster, Schmidt and Webb, 2023): random kernels in groups of eight that read the same dims. At each
    time step the kernel of the largest convolution scores that value, and the kernel of the smallest one scores 1.
    Features are the square roots of the mean scores, half of them those of first differences.
    """

    def __init__(self, dims: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.dilations = dilations
        shape = (2 * len(dilations), GROUP, GROUPS, LENGTH * dims)
        self.weight = _fixed(torch.zeros(shape))

    @classmethod
    def fitted(cls, series: Padded, generator: np.random.Generator) -> Competing:
        """Random kernels, for series of this length."""
        most = max((int(series.real.sum(1).max()) - 1) / (LENGTH - 1), 1.0)
        dims = series.values.shape[-1]
        module = cls(dims, [2**power for power in range(int(np.log2(most)) + 1)])
        for weight in module.weight.data:
            kernels = generator.normal(size=(GROUP * GROUPS, LENGTH, 1))
            kernels -= kernels.mean(1, keepdims=True)
            kernels /= np.abs(kernels).sum(1, keepdims=True)
            chosen = np.tile(subsets(GROUPS, dims, generator), (GROUP, 1))[:, None]
            weight.copy_(torch.from_numpy((kernels * chosen).reshape(weight.shape)))
        return module.to(series.values.device)

    @property
    def width(self) -> int:
        """Number of features."""
        return 4 * len(self.dilations) * GROUP * GROUPS

    @torch.no_grad()
    def forward(self, series: Padded, progress: Progress = silent) -> Float[Tensor, "batch features"]:
        """The features of all series, in batches."""
        return batched(self._features, series, GROUP * CHUNK, "competing kernels", progress)

    def _features(self, series: Padded) -> Float[Tensor, "batch features"]:
        features = list[Tensor]()
        views = product((series, differences(series)), self.dilations)
        for (view, dilation), kernels in zip(views, self.weight, strict=True):
            for weight in kernels.split(CHUNK, 1):
                features += scores(convolved(view.values, weight.flatten(0, 1), dilation), view)
        return torch.cat(features).clamp(min=0).sqrt().T


def scores(values: Float[Tensor, "kernels n batch"], view: Padded) -> list[Float[Tensor, "kernels batch"]]:
    """Mean scores of the kernels k · groups + g of each group g: values of the largest, and counts of the smallest."""
    real, size = view.real.T, (1 / view.real.sum(1)).to(values)
    grouped = values.unflatten(0, (GROUP, -1))
    largest, smallest = grouped.amax(0) - TIE, grouped.amin(0) + TIE
    if not real.all():
        largest.masked_fill_(~real, torch.inf)
        smallest.masked_fill_(~real, -torch.inf)
    wins = torch.lt(grouped, smallest, out=torch.empty_like(grouped))
    counts = wins.sum(2)
    strength = torch.gt(grouped, largest, out=wins).mul_(grouped).sum(2)
    return [(score * size).flatten(0, 1) for score in (strength, counts)]
