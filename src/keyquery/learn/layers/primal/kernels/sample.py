"""Projection weights W_e|X = f(X)ᵀWe and W_r|X = f(X)ᵀWr, and their gradients, by Triton kernels.

Signatures are those of `sample.combine` and `sample.uncombine`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keyquery.learn.layers.primal.kernels.finish import launch_finish
from keyquery.learn.layers.primal.kernels.prepare import launch_prepare


def combine(
    x: Float[Tensor, "batch n d"],
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
) -> Float[Tensor, "2 batch heads p s"]:
    """As `sample.combine`."""
    return (_COMBINE if torch.compiler.is_compiling() else _run_combine)(x, place, directions, used)


def uncombine(
    x: Float[Tensor, "batch n d"],
    place: Int[Tensor, "*batch rows"],
    directions: Float[Tensor, "2 heads rows s"],
    used: Bool[Tensor, "batch rows"] | None,
    grad_weights: Float[Tensor, "2 batch heads p s"],
    grad_x: Float[Tensor, "batch n d"],
) -> Float[Tensor, "2 heads rows s"]:
    """As `sample.uncombine`."""
    run = _UNCOMBINE if torch.compiler.is_compiling() else _run_uncombine
    return run(x, place, directions, used, grad_weights, grad_x)


def _run_combine(x: Tensor, place: Tensor | None, directions: Tensor, used: Tensor | None) -> Tensor:
    return launch_prepare(x, place, directions, used, x.dtype)[0]


def _run_uncombine(
    x: Tensor, place: Tensor, directions: Tensor, used: Tensor | None, grad_weights: Tensor, grad_x: Tensor
) -> Tensor:
    if len(x) == 0:
        return torch.zeros(directions.shape, dtype=torch.float32, device=x.device)
    return launch_finish(x, place, directions, used, grad_weights.contiguous(), directions.shape[2], grad_x)[0]


_COMBINE: Any = torch.library.custom_op(
    "keyquery::primal_combine",
    _run_combine,
    mutates_args=(),
    schema="(Tensor x, Tensor? place, Tensor directions, Tensor? used) -> Tensor",
)
_UNCOMBINE: Any = torch.library.custom_op(
    "keyquery::primal_uncombine",
    _run_uncombine,
    mutates_args=("grad_x",),
    schema="(Tensor x, Tensor place, Tensor directions, Tensor? used, Tensor grad_weights, Tensor(a!) grad_x)"
    " -> Tensor",
)


@_COMBINE.register_fake
def _shape_combine(x: Tensor, place: Tensor | None, directions: Tensor, used: Tensor | None) -> Tensor:
    _, heads, _, s = directions.shape
    return x.new_empty(2, len(x), heads, x.shape[-1] // heads, -(-s // 8) * 8)[..., :s]


@_UNCOMBINE.register_fake
def _shape_uncombine(
    x: Tensor, place: Tensor, directions: Tensor, used: Tensor | None, grad_weights: Tensor, grad_x: Tensor
) -> Tensor:
    return directions.new_empty(directions.shape, dtype=torch.float32)
