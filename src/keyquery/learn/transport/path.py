"""Positions of the same points at every recorded step, and their path lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from keyquery.reading import digest


@runtime_checkable
class Course(Protocol):
    """A recorded path; records are counted from 0."""

    count: int  # of points

    @property
    def steps(self) -> Sequence[int]:
        """The training step of every record."""
        ...

    def place(self, record: int) -> Float[Tensor, "n d"]:
        """Positions of the points at a record, float64."""
        ...

    def gone(self, record: int) -> Float[Tensor, " n"]:
        """Path length of each point up to a record, float64."""
        ...


def ends(course: Course) -> dict[str, str]:
    """Digests of the first and last positions, in float64."""
    return {name: digest(course.place(at).double()) for name, at in (("start", 0), ("end", len(course.steps) - 1))}


class ArrayCourse:
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
        self._path, self.count = path, shapes[0][0]
        self.steps = range(len(shapes))
        before = self.place(0)
        lengths = torch.zeros(self.count, dtype=torch.float64, device=before.device)
        self._lengths = [lengths]
        for step in self.steps[1:]:
            now = self.place(step)
            lengths = lengths + (now - before).norm(dim=-1)
            self._lengths.append(lengths)
            before = now

    def place(self, record: int) -> Float[Tensor, "n d"]:
        """Positions of the points at a step."""
        cloud = self._path[record]
        here = (cloud.detach() if isinstance(cloud, Tensor) else torch.from_numpy(np.array(cloud))).double()
        if not here.isfinite().all():
            bad = int((~here.isfinite()).any(-1).sum())
            raise ValueError(f"path must be finite: at step {record}, {bad} of {self.count} points are NaN or infinite")
        return here

    def gone(self, record: int) -> Float[Tensor, " n"]:
        """Path length of each point up to a step."""
        return self._lengths[record]
