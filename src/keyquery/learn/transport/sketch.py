"""A path projected to two dimensions, small enough to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.learn.transport.path import Course
from keyquery.reading import plain, short

DIGITS = 4
ROUNDS, BESIDE = 30, 6  # iterations, and oversampling of the subspace


def sketch(
    course: Course, records: Sequence[int], groups: Mapping[Any, Tensor], target: Float[Tensor, "n d"], points: int
) -> dict[str, Any]:
    """Some points at some records, projected on their two principal components.

    `frames` holds x₀, y₀, x₁, y₁, … of each record, `targets` the optimal target of each point, `classes` the class
    index of each point, `shares` the variance explained by each component.
    """
    chosen = torch.randperm(course.count, generator=torch.Generator().manual_seed(0))[:points].sort().values
    number = torch.zeros(course.count, dtype=torch.long)
    for at, rows in enumerate(groups.values()):
        number[rows] = at
    places = torch.stack([course.place(record)[chosen].cpu() for record in records])
    centre = places.mean((0, 1))
    centred = (places - centre).flatten(0, 1)
    directions = principal(centred)
    total = centred.square().sum()
    shares = (centred @ directions).square().sum(0) / (total if total > 0 else 1)
    frames = ((places - centre) @ directions).flatten(1)
    targets = ((target[chosen].cpu() - centre) @ directions).flatten()
    drawn = {"frames": frames, "targets": targets, "classes": number[chosen], "shares": shares}
    return short(plain(drawn), DIGITS)


def principal(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d 2"]:
    """The two leading right singular vectors of centred rows; with one column the second direction is zero.

    By subspace iteration with its own generator: fast for large widths, and leaves the global random state alone.
    """
    width = rows.shape[1]
    start = torch.randn(width, min(2 + BESIDE, width), generator=torch.Generator().manual_seed(0), dtype=rows.dtype)
    basis = torch.linalg.qr(start).Q
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(rows.mT @ (rows @ basis)).Q
    _, _, right = torch.linalg.svd(rows @ basis, full_matrices=False)
    components = (basis @ right.mT)[:, :2]
    return torch.nn.functional.pad(components, (0, 2 - components.shape[1]))
