"""A head's QK form as a sum of components in [q; k], largest first, for low-rank projection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from keyquery.forms import Form, Rope
from keyquery.intervene.project.rotary_planes import fill, inverse, pairs, plane_rows


class Component(NamedTuple):
    """(query·u)·(key·u′) with u = [q; k]: one dimension, or a rotary plane's two; its share of ‖M‖²."""

    share: float
    query: Float[Tensor, "d n"]
    key: Float[Tensor, "d n"]


def components(kernel: str, gram: Float[Tensor, "n n"], rope: Rope | None = None) -> list[Component]:
    """The components of a head M, or of its "symmetric", "psd" or "skew" part, by falling share of ‖M‖².

    `gram` is that of [Q; K], or the covariance of [q; k]. Without RoPE they are the singular vectors. A rotary plane is
    a complex number, M_p = conj(q_p)·k_p, and planes do not interact: their singular vectors have two dimensions each,
    and shares are averages over all rotations.
    """
    rank, gram = gram.shape[-1] // 2, gram.detach().double()
    rotated = 0 if rope is None else rope.dims
    rest = torch.arange(rotated, rank)
    parts, total = [], 0.0
    if len(rest):
        both = torch.cat((rest, rest + rank))
        form = Form.from_gram(gram[both[:, None], both])
        matrix = form.query.mT @ form.key
        total += float(matrix.square().sum())
        left, sizes, right = _svd(matrix, kernel, torch.cat((form.query, form.key)))
        for size, query, key in zip(sizes.tolist(), left, right, strict=True):
            rows = torch.zeros(2, 1, 2 * rank, dtype=gram.dtype)
            rows[0, 0, both], rows[1, 0, both] = query, key
            parts.append((size**2, *rows))
    if rope is not None:
        first, second = pairs(rope, gram.device)
        mean = rope.factor**4 / 2  # mean over rotations of (Re e^{iθ}w)²/|w|²
        for a, b, rows in zip(first, second, plane_rows(gram, first, second), strict=True):
            matrix = rows[:1].mH @ rows[1:]
            total += mean * float(matrix.abs().square().sum())
            left, sizes, right = _svd(matrix, kernel, rows)
            for size, query, key in zip(sizes.tolist(), left, right, strict=True):
                parts.append((mean * size**2, _real(query, a, b, rank), _real(key, a, b, rank)))
    parts.sort(key=lambda part: -part[0])
    least = torch.finfo(gram.dtype).eps * rank * total
    return [Component(energy / total, query, key) for energy, query, key in parts if energy > least]


def _svd(matrix: Tensor, kernel: str, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors of a part of a matrix, each with the root of its size, as rows on u where rows·w = u."""
    match kernel:
        case "symmetric":
            matrix = (matrix + matrix.mH) / 2
        case "skew":
            matrix = (matrix - matrix.mH) / 2
        case "psd":
            values, vectors = torch.linalg.eigh((matrix + matrix.mH) / 2)
            matrix = vectors * values.clamp(min=0) @ vectors.mH
    left, sizes, right = torch.linalg.svd(matrix)
    roots, back = sizes.sqrt()[:, None], inverse(rows)
    return roots * left.mH @ back, sizes, roots * right @ back


def _real(row: Shaped[Tensor, "2"], a: Tensor, b: Tensor, rank: int) -> Float[Tensor, "2 n"]:
    """Complex coefficients of (q_p, k_p) as two rows on [q; k]."""
    out = torch.zeros(2, 2 * rank, dtype=torch.float64)
    first, second = torch.tensor([0]), torch.tensor([1])
    for side, number in enumerate(row):
        fill(out, first, second, a[None] + side * rank, b[None] + side * rank, number[None])
    return out
