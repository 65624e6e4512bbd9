"""Cosines and sines of many frequencies at many times, with a backward pass that reuses them."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

TURN = 2 * math.pi
MANY = 2.0**16  # turns up to which a float64 product keeps ten digits of the phase
UPPER = ~(2**27 - 1)  # the sign, the exponent and the upper half of a float64's digits


def waves(
    since: Float64[Tensor, "*batch n"],
    frequencies: Float64[Tensor, " f"],
    sizes: Float[Tensor, " f"],
    rest: Float64[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch n dim"]:
    """[s₁ cos ω₁t, s₁ sin ω₁t, …] for every t = `since` + `rest`, in the dtype of `sizes` > 0, dim = 2 f.

    Phases are computed in turns in float64 and reduced exactly, even beyond 10¹⁶ turns, so that the result is
    precise in any dtype.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the gradient itself, and does not support complex numbers
        return torch.stack(_pairs(since, frequencies, sizes, rest), -1).flatten(-2)
    encoded: Tensor = _Waves.apply(since, frequencies, sizes, rest)  # type: ignore[no-untyped-call]
    return encoded


class _Waves(torch.autograd.Function):
    """Autograd would store float64 phases and recompute every sine: three times the work."""

    generate_vmap_rule = True

    @staticmethod
    def forward(since: Tensor, frequencies: Tensor, sizes: Tensor, rest: Tensor | None) -> Tensor:
        return torch.view_as_real(torch.complex(*_pairs(since, frequencies, sizes, rest))).flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3], output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # With z = s e^{iωt} and g the gradient as a complex number, z̄g = s ∂s + i ∂(ωt).
        since, frequencies, sizes, code = ctx.saved_tensors
        both = _complex(code).conj() * _complex(gradients[0])
        ones = torch.ones_like(since)
        sums = torch.stack((ones, since)).flatten(1).to(both.dtype) @ both.flatten(0, -2)
        by_time = both.imag.double() @ frequencies if ctx.needs_input_grad[0] else None
        return by_time, sums[1].imag.double(), sums[0].real / sizes, None


def phases(
    since: Float64[Tensor, "*times"], frequencies: Float64[Tensor, " f"], rest: Float64[Tensor, "*times"] | None = None
) -> Float64[Tensor, "*times f"]:
    """ω(since + rest) modulo 2π, from −π to π."""
    times, each = since.unsqueeze(-1), frequencies / TURN
    if _few(since, each):
        turns = times * each
    else:
        terms = _exact_products(times, each) + ([] if rest is None else [rest.unsqueeze(-1) * each])
        turns = torch.stack([term - term.round() for term in terms]).sum(0)
    return (turns - turns.round()).mul_(TURN)


def _few(since: Tensor, each: Tensor) -> bool:
    """Whether a float64 product is precise enough; False if values cannot be inspected (compiled or vmap)."""
    if torch.compiler.is_compiling() or since.is_meta or since.numel() == 0:
        return since.numel() == 0
    try:
        return bool(since.detach().abs().max() * each.detach().abs().max() <= MANY)
    except RuntimeError:
        return False


def _exact_products(a: Tensor, b: Tensor) -> list[Tensor]:
    """Terms that sum to a·b without rounding: products of halves with 26 or 27 bits each."""
    upper_a, upper_b = (t.detach().view(torch.int64).bitwise_and(UPPER).view(torch.float64) for t in (a, b))
    lower_a, lower_b = a - upper_a, b - upper_b
    return [upper_a * upper_b, upper_a * lower_b, lower_a * upper_b, lower_a * lower_b]


def _pairs(since: Tensor, frequencies: Tensor, sizes: Tensor, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    angles = phases(since, frequencies, rest).to(sizes.dtype)
    return angles.cos() * sizes, angles.sin() * sizes


def _complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous())
