"""Cosines and sines of many frequencies at many times, with a gradient that computes none of them again."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

TURN = 2 * math.pi


def waves(
    since: Float64[Tensor, "*batch n"], frequencies: Float64[Tensor, " f"], sizes: Float[Tensor, " f"]
) -> Float[Tensor, "*batch n dim"]:
    """[s₁ cos ω₁t, s₁ sin ω₁t, s₂ cos ω₂t, …] for every t of `since`, in the dtype of `sizes` > 0, dim = 2 f.

    Phases are counted in turns in float64, and whole turns are taken off exactly; what is left is as precise as cosines
    need in any dtype.

    >>> found = waves(torch.tensor([0.0, 1.0]).double(), torch.tensor([torch.pi]).double(), torch.ones(1))
    >>> found.round()
    tensor([[ 1.,  0.],
            [-1., ...0.]])
    """
    if torch.compiler.is_compiling():  # which fuses the gradient, too, and knows no complex numbers
        return torch.stack(_pairs(since, frequencies, sizes), -1).flatten(-2)
    found: Tensor = _Waves.apply(since, frequencies, sizes)  # type: ignore[no-untyped-call]
    return found


class _Waves(torch.autograd.Function):
    """Autograd alone would keep phases in float64 and compute every sine again: three times the work of the waves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(since: Tensor, frequencies: Tensor, sizes: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(*_pairs(since, frequencies, sizes))).flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # With z = s e^{iωt} and g the gradient as a complex number, z̄g = s ∂s + i ∂(ωt).
        since, frequencies, sizes, code = ctx.saved_tensors
        both = _complex(code).conj() * _complex(gradients[0])
        ones = torch.ones_like(since)
        sums = torch.stack((ones, since)).flatten(1).to(both.dtype) @ both.flatten(0, -2)
        by_time = both.imag.double() @ frequencies if ctx.needs_input_grad[0] else None
        return by_time, sums[1].imag.double(), sums[0].real / sizes


def _pairs(since: Tensor, frequencies: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    turns = since.unsqueeze(-1) * (frequencies / TURN)
    angles = (turns - turns.round()).mul_(TURN).to(sizes.dtype)
    return angles.cos() * sizes, angles.sin() * sizes


def _complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous())
