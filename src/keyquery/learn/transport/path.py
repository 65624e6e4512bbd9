"""Positions of the same points at every recorded step, and their path lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from keyquery.reading import digest, plain, short

DIGITS = 4


class Course:
    """A path of points in memory or in a memory map, converted to float64 one record at a time."""

    def __init__(self, path: Any, steps: Sequence[int] | None = None) -> None:
        if not isinstance(path, (Tensor, ndarray, list, tuple)):
            raise TypeError(
                f"path must be an array (steps + 1, points, dims) or a list of point clouds, got {type(path).__name__}"
            )
        shapes = [tuple(np.shape(cloud)) for cloud in path]
        if len(shapes) < 2:
            raise ValueError(f"path must have a start and an end, (steps + 1, points, dims), got {len(shapes)} step")
        for step, shape in enumerate(shapes):
            if shape != shapes[0]:
                first = f"step 0 has shape {shapes[0]}"
                raise ValueError(f"path must have the same points at every step: {first}, step {step} {shape}")
        if len(shapes[0]) != 2 or 0 in shapes[0]:
            raise ValueError(f"path must have shape (steps + 1, points, dims), got {(len(shapes), *shapes[0])}")
        self._path, self.count = path, shapes[0][0]
        self.steps = list(range(len(shapes)) if steps is None else steps)  # the training step of every record
        before = self.positions(0)
        self.lengths = [torch.zeros_like(before[:, 0])]  # of the path of each point up to every record, float64
        for record in range(1, len(shapes)):
            now = self.positions(record)
            self.lengths.append(self.lengths[-1] + (now - before).norm(dim=-1))
            before = now

    def positions(self, record: int) -> Float[Tensor, "n d"]:
        """Positions of the points at a record, float64."""
        cloud = self._path[record]
        points = (cloud.detach() if isinstance(cloud, Tensor) else torch.from_numpy(np.array(cloud))).double()
        if not points.isfinite().all():
            bad = int((~points.isfinite()).any(-1).sum())
            raise ValueError(
                f"path must be finite: at step {record}, {bad} of {len(points)} points are NaN or infinite"
            )
        return points

    def ends(self) -> dict[str, str]:
        """Digests of the first and last positions, in float64."""
        return {"start": digest(self.positions(0)), "end": digest(self.positions(len(self.steps) - 1))}


def sketch(
    course: Course, records: Sequence[int], groups: Mapping[Any, Tensor], target: Float[Tensor, "n d"], points: int
) -> dict[str, Any]:
    """Some points at some records, projected on their two principal components.

    `frames` holds x₀, y₀, x₁, y₁, … of each record, `targets` the optimal target of each point, `classes` the class
    index of each point, `shares` the variance explained by each component.
    """
    chosen = torch.randperm(course.count, generator=torch.Generator().manual_seed(0))[:points].sort().values
    number = torch.zeros(course.count, dtype=torch.long)
    for index, rows in enumerate(groups.values()):
        number[rows] = index
    positions = torch.stack([course.positions(record)[chosen].cpu() for record in records])
    centre = positions.mean((0, 1))
    centred = (positions - centre).flatten(0, 1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # of the iterations for the leading directions
        directions = torch.svd_lowrank(centred, min(8, *centred.shape), niter=30)[2][:, :2]
    directions = torch.nn.functional.pad(directions, (0, 2 - directions.shape[1]))
    total = centred.square().sum()
    shares = (centred @ directions).square().sum(0) / (total if total > 0 else 1)
    frames = ((positions - centre) @ directions).flatten(1)
    targets = ((target[chosen].cpu() - centre) @ directions).flatten()
    drawn = {"frames": frames, "targets": targets, "classes": number[chosen], "shares": shares}
    return short(plain(drawn), DIGITS)
