"""Positions of the same points at every recorded step, and their path lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from keyquery.reading import digest, plain, short

DIGITS = 4


class Course(ABC):
    """A recorded path; records are counted from 0."""

    def __init__(self, start: Float[Tensor, "n d"]) -> None:
        self.count = len(start)
        self.steps: list[int] = [0]  # the training step of every record
        self._lengths = [torch.zeros(self.count, dtype=torch.float64, device=start.device)]

    def _append(self, step: int, before: Tensor, now: Tensor) -> None:
        self.steps.append(step)
        self._lengths.append(self._lengths[-1] + (now.double() - before.double()).norm(dim=-1))

    @abstractmethod
    def place(self, record: int) -> Float[Tensor, "n d"]:
        """Positions of the points at a record, float64."""

    def gone(self, record: int) -> Float[Tensor, " n"]:
        """Path length of each point up to a record, float64."""
        return self._lengths[record]


class ArrayCourse(Course):
    """A path in memory or in a memory map, converted to float64 one step at a time."""

    def __init__(self, path: Any) -> None:
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
        self._path = path
        before = self.place(0)
        super().__init__(before)
        for step in range(1, len(shapes)):
            now = self.place(step)
            self._append(step, before, now)
            before = now

    def place(self, record: int) -> Float[Tensor, "n d"]:
        """Positions of the points at a step."""
        cloud = self._path[record]
        points = (cloud.detach() if isinstance(cloud, Tensor) else torch.from_numpy(np.array(cloud))).double()
        if not points.isfinite().all():
            bad = int((~points.isfinite()).any(-1).sum())
            raise ValueError(
                f"path must be finite: at step {record}, {bad} of {len(points)} points are NaN or infinite"
            )
        return points


class RecordedCourse(Course):
    """A path that grows: steps between the first and the latest are kept as differences from the start in 16 bits.

    Differences are scaled by the largest one: about three significant digits of the displacement.
    """

    def __init__(self, start: Float[Tensor, "n d"]) -> None:
        super().__init__(start)
        self._start = self._last = start
        self._moved: list[tuple[float, Tensor]] = []

    def add(self, step: int, points: Float[Tensor, "n d"]) -> None:
        """Add the points at a further step."""
        self._append(step, self._last, points)
        moved = points - self._start
        scale = float(moved.abs().max()) or 1.0
        self._moved.append((scale, (moved / scale).half()))
        self._last = points

    def place(self, record: int) -> Float[Tensor, "n d"]:
        """Positions of the points at a record, float64; 0 is the start."""
        if record in (0, len(self.steps) - 1):
            return (self._last if record else self._start).double()
        scale, moved = self._moved[record - 1]
        return self._start.double() + moved.double() * scale


def ends(course: Course) -> dict[str, str]:
    """Digests of the first and last positions, in float64."""
    return {name: digest(course.place(at)) for name, at in (("start", 0), ("end", len(course.steps) - 1))}


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
    places = torch.stack([course.place(record)[chosen].cpu() for record in records])
    centre = places.mean((0, 1))
    centred = (places - centre).flatten(0, 1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # of the iterations for the leading directions
        directions = torch.svd_lowrank(centred, min(8, *centred.shape), niter=30)[2][:, :2]
    directions = torch.nn.functional.pad(directions, (0, 2 - directions.shape[1]))
    total = centred.square().sum()
    shares = (centred @ directions).square().sum(0) / (total if total > 0 else 1)
    frames = ((places - centre) @ directions).flatten(1)
    targets = ((target[chosen].cpu() - centre) @ directions).flatten()
    drawn = {"frames": frames, "targets": targets, "classes": number[chosen], "shares": shares}
    return short(plain(drawn), DIGITS)
