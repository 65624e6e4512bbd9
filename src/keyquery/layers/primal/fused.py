"""Which implementation runs, and one autograd step around it that keeps only queries, keys and small matrices."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.layers.jit import no_kernels
from keyquery.layers.primal import reference

IMPLEMENTATIONS = ("auto", "reference", "triton")
# Features and values of a head that the Triton kernels can hold at once.
WIDEST = {torch.float16: 128, torch.bfloat16: 128, torch.float32: 64}


def fused(
    qk: Float[Tensor, "batch n 2 heads p"],
    maps: Float[Tensor, "2 batch heads p v"],
    bias: Float[Tensor, " v"],
    real: Bool[Tensor, "batch n"] | None = None,
    feature: str = "cosine",
    impl: str = "auto",
) -> tuple[Float[Tensor, "batch n heads v"], Float[Tensor, "2 batch heads p p"]]:
    """o = φ(q)M_e + φ(k)M_r + b (batch, n, heads, v) and the Gram matrices Σ φφᵀ, by one pass over q and k.

    >>> qk, maps = torch.randn(1, 5, 2, 3, 4), torch.randn(2, 1, 3, 4, 4)
    >>> out, grams = fused(qk, maps, torch.zeros(4))
    >>> out.shape, grams.diagonal(dim1=-2, dim2=-1).sum(-1).allclose(torch.tensor(5.0))  # unit vectors
    (torch.Size([1, 5, 3, 4]), True)
    """
    impl = choose(impl, qk, maps.shape[-1])
    out, grams = _Fused.apply(qk, maps, bias, real, feature, impl)  # type: ignore[no-untyped-call]
    return out, grams


def choose(impl: str, qk: Tensor, v: int) -> str:
    """The implementation that runs; an explicit one that cannot is refused."""
    if impl == "reference" or (impl == "auto" and not qk.is_cuda):
        return "reference"
    why = _refusal(qk, v)
    if why is None:
        return "triton"
    if impl == "auto":
        return "reference"
    raise RuntimeError(f'impl="triton" {why}; impl="auto" takes the reference there')


def _refusal(qk: Tensor, v: int) -> str | None:
    """Why the Triton kernels cannot run on this input; None where they can."""
    if (why := no_kernels(qk)) is not None:
        return why
    if qk.dtype not in WIDEST:
        return f"computes in float16, bfloat16 or float32, but x is {qk.dtype}"
    if max(qk.shape[-1], v) > WIDEST[qk.dtype]:
        return f"holds heads of up to {WIDEST[qk.dtype]} features in {qk.dtype}, not {max(qk.shape[-1], v)}"
    return None


def _module(impl: str) -> ModuleType:
    if impl == "reference":
        return reference
    import keyquery.layers.primal.triton as kernels  # on use only

    return kernels


class _Fused(torch.autograd.Function):
    """Saves q, k and maps; features are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, qk: Tensor, maps: Tensor, bias: Tensor, real: Tensor | None, feature: str, impl: str
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # where the loss is not used, its half of backward is not computed
        ctx.save_for_backward(qk, maps, real)
        ctx.feature, ctx.impl, ctx.bias_dtype = feature, impl, bias.dtype
        return _module(impl).forward(qk, maps, bias, real, feature)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_grams: Tensor | None) -> tuple[Tensor | None, ...]:
        qk, maps, real = ctx.saved_tensors
        if grad is None:
            grad = qk.new_zeros(*qk.shape[:2], qk.shape[3], maps.shape[-1])
        found = _module(ctx.impl).backward(qk, maps, real, ctx.feature, grad, grad_grams)
        grad_qk, grad_maps, grad_bias = found
        return grad_qk, grad_maps.to(maps.dtype), grad_bias.to(ctx.bias_dtype), None, None, None
