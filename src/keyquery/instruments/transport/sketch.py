"""A course in two dimensions, small enough to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.instruments.transport.path import Course
from keyquery.reading import plain, short

DIGITS = 4
ROUNDS, BESIDE = 30, 6  # of subspace iteration, and directions that it carries along besides the two


def sketch(
    course: Course, records: Sequence[int], groups: Mapping[Any, Tensor], target: Float[Tensor, "n d"], points: int
) -> dict[str, Any]:
    """Some points at some records, on the two principal directions of all of them.

    `frames` holds x₀, y₀, x₁, y₁, … of each record, `targets` where optimal transport would have sent each point;
    `classes` the number of each point's class, `shares` of the variance that each of the two directions shows.
    """
    some = torch.randperm(course.count, generator=torch.Generator().manual_seed(0))[:points].sort().values
    number = torch.zeros(course.count, dtype=torch.long)
    for at, rows in enumerate(groups.values()):
        number[rows] = at
    places = torch.stack([course.place(record)[some].cpu() for record in records])
    centre = places.mean((0, 1))
    centred = (places - centre).flatten(0, 1)
    directions = principal(centred)
    total = centred.square().sum()
    shares = (centred @ directions).square().sum(0) / (total if total > 0 else 1)
    frames = ((places - centre) @ directions).flatten(1)
    targets = ((target[some].cpu() - centre) @ directions).flatten()
    drawn = {"frames": frames, "targets": targets, "classes": number[some], "shares": shares}
    return short(plain(drawn), DIGITS)


def principal(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d 2"]:
    """The two leading right singular vectors of centred rows; with one column the second direction is zero.

    By subspace iteration from a fixed start: widths of thousands take as many products, and no random state is touched.

    >>> principal(torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).double()).abs().round()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    width = rows.shape[1]
    drawn = torch.randn(width, min(2 + BESIDE, width), generator=torch.Generator().manual_seed(0), dtype=rows.dtype)
    basis = torch.linalg.qr(drawn).Q
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(rows.mT @ (rows @ basis)).Q
    _, _, turned = torch.linalg.svd(rows @ basis, full_matrices=False)
    found = (basis @ turned.mT)[:, :2]
    return torch.nn.functional.pad(found, (0, 2 - found.shape[1]))
