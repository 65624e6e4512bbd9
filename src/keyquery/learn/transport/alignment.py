"""Class centres, optimal-transport pairing of points with samples of their targets, and the MLP."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.forms.coupling import match
from keyquery.support.progress import Progress, silent

GEOMETRIES = ("circle", "simplex", "learned")
MATCHES = ("ot", "random", "mean")
SIDE = 4.0  # initial distance of learned centres: of two classes N(μ_c, I), one point in forty is nearer to the other
PULL = 0.1  # weight of the squared error beside the cross-entropy, if centres are learned
EXACT = 1000  # points per class that are matched exactly: half a second at most; time is cubic
BATCH = 250  # points per mini-batch for larger classes


def centres(geometry: str, classes: int, dims: int) -> Float64[Tensor, "k dims"]:
    """Centres μ_c of k classes: on a circle, μ_c = 3k (sin 2πc/k, cos 2πc/k, 0, …), or at the corners of a simplex.

    There are as many dimensions as the centres need, 2 or k − 1, and at least `dims`. The edges of the simplex are as
    long as those between neighbours on the circle, 6k sin π/k: for two or three classes both are equal up to a
    rotation. The nearest centre to Σ_c p_c μ_c is that of the largest p_c on a simplex, and on a circle with up to
    three classes. Learned centres start as a simplex with edges of 4, so that some points are wrong.
    """
    positions = torch.zeros(classes, max(dims, 2 if geometry == "circle" else classes - 1), dtype=torch.float64)
    if geometry == "circle":
        turns = 2 * torch.pi * torch.arange(classes, dtype=torch.float64) / classes
        positions[:, :2] = 3 * classes * torch.stack((turns.sin(), turns.cos()), 1)
        return positions
    # Helmert's rows: orthonormal, and orthogonal to (1, …, 1), so that unit vectors keep their distance √2 in them.
    for row in range(1, classes):
        positions[:row, row - 1], positions[row, row - 1] = 1.0, -float(row)
        positions[:, row - 1] /= (row * (row + 1)) ** 0.5
    side = SIDE if geometry == "learned" else 6 * classes * float(np.sin(np.pi / classes))
    return positions * side / 2**0.5


class Aligned(NamedTuple):
    """Standardised points, their classes, targets relative to the centre of the class, and weights."""

    x: Float[Tensor, "points features"]
    target: Int[Tensor, " points"]
    offset: Float[Tensor, "points dims"]
    weight: Float[Tensor, " points"]

    def take(self, index: np.ndarray) -> Aligned:
        """A subset of the points."""
        chosen = torch.as_tensor(index, device=self.x.device)
        return Aligned(*(part[chosen] for part in self))

    def to(self, device: str) -> Aligned:
        """The same in float32 on another device."""
        return Aligned(*(part.to(device, torch.float32 if part.is_floating_point() else part.dtype) for part in self))

    def mean(self, losses: Float[Tensor, " points"]) -> Float[Tensor, ""]:
        """The weighted mean of the losses of all points."""
        return (self.weight * losses).sum() / self.weight.sum()


def align(
    x: Float64[Tensor, "points features"],
    target: Int[Tensor, " points"],
    dims: int,
    how: str,
    seed: int,
    progress: Progress = silent,
) -> Float64[Tensor, "points dims"]:
    """Pair the points of each class with as many samples of N(0, I), their targets around the class centre.

    "ot" minimises Σ‖x − sample‖² within each class, "random" pairs at random, "mean" sets all targets to 0. For squared
    distances the optimal pairing does not depend on the centre. Missing dimensions are zero-padded. A class of more
    than 1,000 points is matched in random mini-batches of 250, so that time is linear and not cubic.
    """
    rng = np.random.default_rng((seed, 1))
    if how == "mean":
        return torch.zeros(len(x), dims, dtype=torch.float64)
    offset = torch.from_numpy(rng.normal(size=(len(x), dims)))
    if how == "ot":
        wide = torch.nn.functional.pad(x, (0, dims - x.shape[1]))
        if (large := int(target.bincount().max())) > EXACT:
            warnings.warn(
                f"a class of {large:,} points, more than {EXACT:,}, is matched exactly only within mini-batches of "
                f"{BATCH}",
                stacklevel=4,
            )
        blocks: list[Tensor] = []
        for number in target.unique():
            members = (target == number).nonzero()[:, 0]
            if len(members) > EXACT:  # in random batches whose sizes differ by at most one
                shuffled = members[torch.from_numpy(rng.permutation(len(members)))]
                blocks += shuffled.tensor_split(-(-len(members) // BATCH))
            else:
                blocks.append(members)
        for block in progress(blocks, "matching", len(blocks)):
            offset[block] = offset[block][match(wide[block], offset[block])]
    return offset


class Mapper(nn.Module):
    """f(x): features to the space of the centres, by layers of `hidden` widths with ReLU between them.

    `centres` (classes, dims) are parameters if `learned`, else fixed.
    """

    centres: Float[Tensor, "k dims"]

    def __init__(
        self, features: int, where: Float64[Tensor, "k dims"], hidden: Sequence[int], learned: bool = False
    ) -> None:
        super().__init__()
        layers = list[nn.Module]()
        for inputs, outputs in pairwise([features, *hidden, where.shape[1]]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        if learned:
            self.centres = nn.Parameter(where.float())
        else:
            self.register_buffer("centres", where.float())

    def forward(self, x: Float[Tensor, "points features"]) -> Float[Tensor, "points dims"]:
        """f(x)."""
        return self.layers(x)

    def distances(self, x: Float[Tensor, "points features"]) -> Float[Tensor, "points k"]:
        """‖f(x) − μ_c‖ for every class."""
        # A tiny number under the root keeps the gradient finite at a centre.
        return ((self(x).unsqueeze(1) - self.centres).square().sum(-1) + 1e-12).sqrt()


def map_loss(model: nn.Module, batch: Aligned) -> Float[Tensor, ""]:
    """‖f(x) − μ_c − offset‖², the mean over points and dimensions, without gradients of the centres."""
    assert isinstance(model, Mapper)
    targets = model.centres.detach()[batch.target] + batch.offset
    return batch.mean((model(batch.x) - targets).square().mean(1))


def class_loss(model: nn.Module, batch: Aligned) -> Float[Tensor, ""]:
    """Cross-entropy of softmax(−‖f(x) − μ_c‖)."""
    assert isinstance(model, Mapper)
    return batch.mean(cross_entropy(-model.distances(batch.x), batch.target, reduction="none"))


def learned_loss(model: nn.Module, batch: Aligned) -> Float[Tensor, ""]:
    """`class_loss`, which trains map and centres, plus a tenth of `map_loss`."""
    return PULL * map_loss(model, batch) + class_loss(model, batch)
