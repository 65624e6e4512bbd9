"""The scores inside torch's fused attention, which does not return them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def fused_scores(
    query: Float[Tensor, "*batch h n r"],
    key: Float[Tensor, "*batch g m r"],
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Float[Tensor, "*batch h n m"], Float[Tensor, "*batch h n m"]]:
    """Scores before and after the mask; the arguments are those of `scaled_dot_product_attention`.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    >>> _, masked = fused_scores(q, k, v, is_causal=True)
    >>> fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(masked.softmax(-1) @ v, fused, atol=1e-6)
    True
    """
    if key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores, scores
    hidden = attn_mask.dtype == torch.bool
    return scores, scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
