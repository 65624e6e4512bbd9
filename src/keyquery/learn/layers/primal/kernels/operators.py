"""The two Triton kernels of a primal layer as operators for torch.compile; signatures are those of `reference`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.learn.layers.primal.kernels.scores import added, launch_backward, launch_forward
from keyquery.learn.layers.primal.reference import Grams


def forward(
    qk: Float[Tensor, "batch n 2 heads p"],
    weights: Float[Tensor, "2 batch heads p s"],
    mix: Float[Tensor, "2 s v"],
    real: Bool[Tensor, "batch n"] | None,
    feature: str,
    gram: bool,
) -> tuple[Float[Tensor, "batch n heads v"], Float[Tensor, "2 batch heads s"], Grams | None]:
    """As `reference.forward`."""
    run = _FORWARD if torch.compiler.is_compiling() else _run_forward
    out, energy, grams = run(qk, weights, mix, real, feature, gram)
    return out, energy, grams if gram else None


def backward(
    qk: Float[Tensor, "batch n 2 heads p"],
    weights: Float[Tensor, "2 batch heads p s"],
    mix: Float[Tensor, "2 s v"],
    real: Bool[Tensor, "batch n"] | None,
    feature: str,
    grad: Float[Tensor, "batch n heads v"],
    grad_energy: Float[Tensor, "2 batch heads s"] | None,
    grad_grams: Float[Tensor, "2 batch heads p p"] | None,
) -> tuple[Float[Tensor, "batch n 2 heads p"], Float[Tensor, "2 batch heads p s"], Float[Tensor, "2 s v"]]:
    """As `reference.backward`."""
    run = _BACKWARD if torch.compiler.is_compiling() else _run_backward
    return run(qk, weights, mix, real, feature, grad, grad_energy, grad_grams)


def _run_forward(
    qk: Tensor, weights: Tensor, mix: Tensor, real: Tensor | None, feature: str, gram: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out, energy, grams = launch_forward(qk, weights, mix, None, real, feature, gram)
    return out, added(energy), added(grams) if gram else energy.new_empty(*energy.shape[1:4], 0, 0)


def _run_backward(
    qk: Tensor,
    weights: Tensor,
    mix: Tensor,
    real: Tensor | None,
    feature: str,
    grad: Tensor,
    grad_energy: Tensor | None,
    grad_grams: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    bend = None if grad_energy is None else (2 * grad_energy).float().contiguous()
    curve = None if grad_grams is None else (grad_grams + grad_grams.mT).contiguous()
    grads = launch_backward(qk, weights, mix, real, feature, grad, bend, None, curve, False, False)
    return grads[0], added(grads[1]), grads[2].sum(0).view(-1, 2, mix.shape[1]).permute(1, 2, 0)


_FORWARD: Any = torch.library.custom_op(
    "keyquery::primal_forward",
    _run_forward,
    mutates_args=(),
    schema="(Tensor qk, Tensor weights, Tensor mix, Tensor? real, str feature, bool gram) -> (Tensor, Tensor, Tensor)",
)
_BACKWARD: Any = torch.library.custom_op(
    "keyquery::primal_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor qk, Tensor weights, Tensor mix, Tensor? real, str feature, Tensor grad, Tensor? grad_energy,"
    " Tensor? grad_grams) -> (Tensor, Tensor, Tensor)",
)


@_FORWARD.register_fake
def _shape_forward(
    qk: Tensor, weights: Tensor, mix: Tensor, real: Tensor | None, feature: str, gram: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _, heads, p = qk.shape
    energy = qk.new_empty(2, batch, heads, weights.shape[-1], dtype=torch.float32)
    grams = qk.new_empty(2, batch, heads, *((p, p) if gram else (0, 0)), dtype=torch.float32)
    return qk.new_empty(batch, n, heads, mix.shape[-1]), energy, grams


@_BACKWARD.register_fake
def _shape_backward(
    qk: Tensor,
    weights: Tensor,
    mix: Tensor,
    real: Tensor | None,
    feature: str,
    grad: Tensor,
    grad_energy: Tensor | None,
    grad_grams: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weights = weights.new_empty(weights.shape, dtype=torch.float32)
    s, v = mix.shape[1:]
    return qk.new_empty(qk.shape), grad_weights, mix.new_empty(v, 2, s, dtype=torch.float32).permute(1, 2, 0)
