"""Fast dropout on a CPU, of activations and in attention, for which torch has no fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout

from keyquery.layers.triton_support import no_kernels

LEVELS = 2**16  # of a random number; four are drawn at once
CELLS = 2**20  # scores per block, so that they fit into the cache
SMALL = 2**14  # entries, below which torch's dropout is as fast
FEW = 2**16  # scores per head, below which blocks do not pay off
LARGE = 2**22  # likewise on a GPU, where they are started one by one


class Dropout(nn.Dropout):
    """`nn.Dropout` that draws 16 random bits per entry on a CPU, four times as fast as torch, which draws 64."""

    def forward(self, input: Tensor) -> Tensor:
        """Entries are 0 with probability p, and the others are scaled by 1/(1 − p)."""
        return _drop(input, self.p) if self.training and self.p < 1 else super().forward(input)


def _drop(x: Tensor, share: float) -> Tensor:
    if share == 0:
        return x
    if x.numel() < SMALL or x.is_cuda or torch.compiler.is_compiling():
        return dropout(x, share)
    return x.mul(_kept(x.shape, share)).mul_(1 / (1 - share))


def _kept(shape: Any, share: float, generator: torch.Generator | None = None) -> Bool[Tensor, "..."]:
    """The mask of kept entries, with probability 1 − share up to 2⁻¹⁶."""
    count = torch.Size(shape).numel()
    drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return (drawn.view(torch.int16)[:count] >= round(share * LEVELS) - LEVELS // 2).view(shape)


def drop_and_attend(
    query: Float[Tensor, "*batch n r"],
    key: Float[Tensor, "*batch m r"],
    value: Float[Tensor, "*batch m v"],
    scale: float,
    share: float,
) -> Float[Tensor, "*batch n v"]:
    """dropout(softmax(scale·q kᵀ)) v; if n × m is large, in blocks of queries that are not stored.

    Backward then recomputes the scores with the same random numbers. On a GPU that is for float32 only.
    """
    if large_in_float32(query, key):
        from keyquery.learn.layers.blockwise import attend  # imports triton, an optional dependency

        return attend(query, key, value, scale, share)
    if query.is_cuda or query.shape[-2] * key.shape[-2] < FEW or share == 0:
        return _drop((query * scale @ key.mT).softmax(-1), share) @ value
    flat = [part.reshape(-1, *part.shape[-2:]) for part in (query, key, value)]
    out: Tensor = _Dropped.apply(*flat, scale, share)  # type: ignore[no-untyped-call]
    return out.view(*query.shape[:-1], value.shape[-1])


def large_in_float32(query: Float[Tensor, "*batch n r"], key: Float[Tensor, "*batch m r"]) -> bool:
    """Whether blocks of scores pay off on a GPU: in training in float32, for which fused kernels are slower."""
    large = query.is_cuda and query.dtype == torch.float32 and query.shape[-2] * key.shape[-2] >= LARGE
    return large and torch.is_grad_enabled() and query.requires_grad and no_kernels(query) is None


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, share: float) -> Tensor:
        ctx.scale = scale
        ctx.share = share
        ctx.seed = int(torch.randint(2**62, ()))
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for head, at, weights, kept in _blocks(query, key, scale, share, ctx.seed):
            torch.mm(weights.mul_(kept), value[head], out=out[head, at])
        out.mul_(1 / (1 - share))
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out = ctx.saved_tensors
        of_query, of_key, of_value = (
            query.new_empty(query.shape),
            key.new_zeros(key.shape),
            value.new_zeros(value.shape),
        )
        mean = (grad * out).sum(-1, keepdim=True)  # the softmax term of backward
        grad = grad / (1 - ctx.share)
        for head, at, weights, kept in _blocks(query, key, ctx.scale, ctx.share, ctx.seed):
            worth = torch.mm(grad[head, at], value[head].mT).mul_(kept)
            of_scores = worth.sub_(mean[head, at]).mul_(weights)
            of_value[head].addmm_(weights.mul_(kept).mT, grad[head, at])
            torch.mm(of_scores, key[head], out=of_query[head, at])
            of_key[head].addmm_(of_scores.mT, query[head, at])
        return of_query.mul_(ctx.scale), of_key.mul_(ctx.scale), of_value, None, None


def _blocks(query: Tensor, key: Tensor, scale: float, share: float, seed: int) -> Any:
    """Per head and block of queries: their slice, attention weights and dropout mask."""
    generator = torch.Generator().manual_seed(seed)
    heads, n, m = len(query), query.shape[1], key.shape[1]
    size = max(CELLS // m, 1)
    for head in range(heads):
        for first in range(0, n, size):
            at = slice(first, first + size)
            scores = torch.mm(query[head, at] * scale, key[head].mT)
            yield head, at, torch.softmax(scores, -1, out=scores), _kept(scores.shape, share, generator)
