"""Which torch functions are linear in their first argument, and how the others are frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keyquery.listening.residual.terms import BIAS, Mapped, Sum, Term, Write, added

ADD = {"add", "__add__", "__radd__", "__iadd__", "add_"}
SUBTRACT = {"sub", "__sub__", "__isub__", "sub_"}
MULTIPLY = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"}
DIVIDE = {"div", "__truediv__", "__itruediv__", "div_", "divide", "true_divide"}
PRODUCTS = {"matmul", "__matmul__", "bmm"}
# Linear in the first argument, with all others fixed.
LINEAR = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous", "dropout", "neg"}
LINEAR |= {"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "unflatten", "expand"}
LINEAR |= {"expand_as", "view_as", "__getitem__", "chunk", "split", "mean", "sum", "movedim", "swapaxes", "where"}
LINEAR |= {"masked_fill", "repeat", "repeat_interleave", "__neg__", "pad"}


def mapped(term: Term, like: Tensor, function: Any) -> Mapped:
    """A linear function of a tensor that has a term."""
    return Mapped(term, function, like.shape, like.dtype)


def scaled(term: Term, like: Tensor, factor: Any, divided: bool) -> Mapped:
    """A product with, or a quotient by, something held fixed."""
    factor = factor.detach() if isinstance(factor, Tensor) else factor
    return mapped(term, like, (lambda x: x / factor) if divided else (lambda x: x * factor))


def projected(term: Term, like: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Term:
    """x Wᵀ + b with a weight (out, in)."""
    image = mapped(term, like, lambda x: x @ weight.detach().mT)
    return image if bias is None else added([image, Write(BIAS, bias.detach())], out.shape)


def normed(
    term: Term,
    x: Tensor,
    out: Tensor,
    centred: bool,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
) -> Term:
    """LayerNorm, or RMSNorm if not `centred`, with its statistics held at those of x; its shift is a bias."""
    wide = x.detach().float() if x.dtype != torch.float64 else x.detach()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    gain = (wide.square().mean(-1, keepdim=True) + eps).rsqrt().to(x.dtype)
    gain = gain if weight is None else gain * weight.detach()
    image = mapped(term, x, lambda t: (t - t.mean(-1, keepdim=True) if centred else t) * gain)
    return image if bias is None else Sum((image, Write(BIAS, bias.detach())), out.shape)
