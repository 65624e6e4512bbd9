"""Fused attention with masks and key terms, without a queries × keys tensor unless the caller passes one."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

CPU_WIDTH = 16  # narrower heads take torch's CPU kernel longer than heads padded to it, in float32
CPU_TOKENS = 64  # with fewer, padding costs more than it saves


def attend(
    query: Float[Tensor, "batch heads n r"],
    key: Float[Tensor, "batch kv m r"],
    value: Float[Tensor, "batch kv m v"],
    scale: float,
    real: Bool[Tensor, "batch m"] | None = None,
    visible: Bool[Tensor, "#batch #heads n m"] | None = None,
    is_causal: bool = False,
    terms: tuple[Float[Tensor, "batch kv m"], ...] = (),
    dropout: float = 0.0,
) -> tuple[
    Float[Tensor, "batch heads n v"],
    Bool[Tensor, "batch #heads n 1"] | None,
]:
    """softmax(scale·(q·k + Σ terms)) v over the keys that are real and visible, and which queries see any.

    The latter is None if all do; a query without visible keys gives 0. `real` and `terms` depend on the key only. They
    are appended as dimensions of the key, in which the query is 1, so that fused kernels need no mask.
    """
    n, m, width = query.shape[-2], key.shape[-2], value.shape[-1]
    if real is not None:
        # NaN in padding must not reach the output.
        key, value = (t.where(real[:, None, :, None], 0.0) for t in (key, value))
        terms = tuple(term.where(real[:, None], 0.0) for term in terms)
    if visible is not None:
        visible = _both(visible, real, is_causal, n, m)
        seen = visible.any(-1, keepdim=True)
    elif real is not None:
        # As low as possible without overflow when scores are scaled, which matters in float16.
        hidden = torch.finfo(key.dtype).min / (1 if key.dtype == torch.float16 else 4)
        terms = (*terms, torch.zeros_like(key[..., 0]).masked_fill(~real[:, None], hidden))
        seen = _sees(real, is_causal, n)[:, None, :, None]
    query, key, value = _not_narrow(*extend(query, key, value, terms))
    grouped = query.shape[1] != key.shape[1]
    is_causal = is_causal and visible is None and n > 1
    if is_causal and n != m:  # a cache: the last query sees the last key
        visible_keys, is_causal = _lower_right(query, n, m), False
    else:
        visible_keys = visible
    out = functional.scaled_dot_product_attention(
        query, key, value, visible_keys, dropout, is_causal, scale=scale, enable_gqa=grouped
    )[..., :width]
    return (out, None) if visible is None and real is None else (out.where(seen, 0.0), seen)


def as_wide(value: Float[Tensor, "batch kv m v"], width: int) -> Float[Tensor, "batch kv m w"]:
    """Values padded to the width of queries and keys, as most fused kernels require.

    cuDNN's accepts narrower ones. Its backward pass is fastest with values of 128 for queries of up to 192.
    """
    if not _takes_narrow(value):
        return pad(value, (0, width - value.shape[-1]))
    slow = torch.is_grad_enabled() and value.requires_grad and 128 < width <= 192 and value.shape[-1] < 128
    return pad(value, (0, 128 - value.shape[-1])) if slow else value


def _takes_narrow(value: Tensor) -> bool:
    """Whether values may be narrower than keys: the cuDNN kernel, which torch prefers from Hopper on, accepts them."""
    if not value.is_cuda or torch.cuda.get_device_properties(value.device).major < 9:
        return False
    return torch.compiler.is_compiling() or torch.backends.cuda.cudnn_sdp_enabled()  # not known to the compiler


def _lower_right(query: Tensor, n: int, m: int) -> Any:
    """Causal for the last n of m tokens."""
    if torch.compiler.is_compiling():  # the compiler does not support the lazy mask
        return torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
    from torch.nn.attention.bias import causal_lower_right  # a slow import

    return causal_lower_right(n, m)


def extend(query: Tensor, key: Tensor, value: Tensor, terms: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Terms as dimensions of the key, padded to a multiple of 8 as fused kernels require, and values to the same."""
    if not terms:
        return query, key, value
    narrow = value.dtype in (torch.float16, torch.bfloat16) and _takes_narrow(value)
    step = 16 if narrow else 8  # 80 dimensions take cuDNN less time than 72
    blank = -(query.shape[-1] + len(terms)) % step
    ones = torch.ones_like(query[..., :1]).expand(*query.shape[:-1], len(terms))
    query = pad(torch.cat((query, ones), -1), (0, blank))
    key = pad(torch.cat((key, torch.stack(terms, -1).to(key.dtype)), -1), (0, blank))
    return query, key, value if narrow else pad(value, (0, max(key.shape[-1] - value.shape[-1], 0)))


def _not_narrow(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Long narrow heads on a CPU, padded with zeros, which change no score: torch's kernel is slower below 16."""
    width, least = key.shape[-1], min(query.shape[-2], key.shape[-2])
    narrow = width < CPU_WIDTH and width == value.shape[-1] and least >= CPU_TOKENS
    if not narrow or key.dtype != torch.float32 or key.device.type != "cpu":
        return query, key, value
    query, key, value = (pad(part, (0, CPU_WIDTH - width)) for part in (query, key, value))
    return query, key, value


def _sees(real: Tensor, is_causal: bool, n: int) -> Bool[Tensor, "batch n"]:
    """Whether each of the last n queries sees any key."""
    if is_causal:
        return (real.cumsum(1) > 0)[:, real.shape[1] - n :]
    return real.any(1, keepdim=True).expand(-1, n)


def _both(visible: Tensor, real: Tensor | None, is_causal: bool, n: int, m: int) -> Tensor:
    if real is not None:
        visible = visible & real[:, None, None]
    if is_causal:
        visible = visible & torch.ones(n, m, dtype=torch.bool, device=visible.device).tril(m - n)
    return visible
