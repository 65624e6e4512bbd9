"""Choice of the implementation, and its autograd function, which saves only queries, keys and small matrices."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.layers.triton_support import no_kernels
from keyquery.learn.layers.primal import reference
from keyquery.learn.layers.primal.reference import Grams

IMPLEMENTATIONS = ("auto", "reference", "triton")
# Largest feature and value dimensions per head of the Triton kernels.
WIDEST = {torch.float16: 128, torch.bfloat16: 128, torch.float32: 64}


def fused(
    qk: Float[Tensor, "batch n 2 heads p"],
    weights: Float[Tensor, "2 batch heads p s"],
    mix: Float[Tensor, "2 s v"],
    real: Bool[Tensor, "batch n"] | None = None,
    feature: str = "cosine",
    impl: str = "auto",
    gram: bool = False,
) -> tuple[Float[Tensor, "batch n heads v"], Float[Tensor, "2 batch heads s"], Grams | None]:
    """o = eCₑ + rCᵣ of scores e = φ(q)W_e and r = φ(k)W_r, Σe² and Σr², and with `gram` Σφφᵀ: one pass over q and k."""
    impl = choose(impl, qk, max(qk.shape[-1], *mix.shape[1:]))
    out, energy, grams = _Fused.apply(qk, weights, mix, real, feature, impl, gram)  # type: ignore[no-untyped-call]
    return out, energy, grams


def choose(impl: str, x: Tensor, widest: int, dtype: torch.dtype | None = None) -> str:
    """The implementation to run in `dtype` (default: that of x); raises if an explicit one cannot."""
    if impl == "reference" or (impl == "auto" and not x.is_cuda):
        return "reference"
    why = _refusal(x, x.dtype if dtype is None else dtype, widest)
    if why is None:
        return "triton"
    if impl == "auto":
        return "reference"
    raise RuntimeError(f'impl="triton" {why}; impl="auto" uses the reference there')


def _refusal(x: Tensor, dtype: torch.dtype, widest: int) -> str | None:
    """Why the Triton kernels cannot run on this input; None if they can."""
    if (why := no_kernels(x)) is not None:
        return why
    if dtype not in WIDEST:
        return f"computes in float16, bfloat16 or float32, but x is {dtype}"
    if widest > WIDEST[dtype]:
        return f"supports heads of up to {WIDEST[dtype]} features in {dtype}, not {widest}"
    return None


def _module(impl: str) -> ModuleType:
    if impl == "reference":
        return reference
    import keyquery.learn.layers.primal.kernels.operators as kernels  # on use only

    return kernels


class _Fused(torch.autograd.Function):
    """Saves q, k and small matrices; features and scores are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any, qk: Tensor, weights: Tensor, mix: Tensor, real: Tensor | None, feature: str, impl: str, gram: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # skip the backward of the loss if it is unused
        ctx.save_for_backward(qk, weights, mix, real)
        ctx.feature, ctx.impl = feature, impl
        return _module(impl).forward(qk, weights, mix, real, feature, gram)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_energy: Tensor | None, grad_grams: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        qk, weights, mix, real = ctx.saved_tensors
        if grad is None:
            grad = qk.new_zeros(*qk.shape[:2], qk.shape[3], mix.shape[-1])
        gradients = _module(ctx.impl).backward(qk, weights, mix, real, ctx.feature, grad, grad_energy, grad_grams)
        grad_qk, grad_weights, grad_mix = gradients
        return grad_qk, grad_weights.to(weights.dtype), grad_mix.to(mix.dtype), None, None, None, None
