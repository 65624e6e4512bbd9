"""Scores of local attention, which some models compute in bands or blocks, by query and key."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def by_pairs(scores: Tensor, heads: int, count: int, window: int) -> Float[Tensor, "1 heads n n"] | None:
    """Scores by query and key, −∞ where there is none; None if they are in no known order of local attention.

    Longformer's are (1, n, heads, 2·window − 1), the keys nearest to each query, behind those of global tokens;
    LongT5's (1, blocks, heads, window, 3·window), the block of each query with its neighbours; those of Gemma's audio
    towers (1, heads, blocks, block, window − 1 + block, or one more), the block of each query and what comes before.
    """
    band = 2 * window - 1
    banded = scores.ndim == 4 and heads != count and scores.shape[:3] == (1, count, heads)
    if banded and band <= scores.shape[3] < band + count:
        near = scores[0, ..., -band:].transpose(0, 1)
        return _placed(near, torch.arange(count) - window + 1)[None]
    if scores.ndim == 5 and scores.shape[2:] == (heads, window, 3 * window) and scores.shape[0] == 1:
        blocks = scores.shape[1]
        starts = torch.arange(blocks).repeat_interleave(window) * window - window
        return _placed(scores[0].transpose(0, 1).flatten(1, 2), starts)[None, :, :count, :count]
    if (
        scores.ndim == 5
        and scores.shape[:2] == (1, heads)
        and scores.shape[4] - scores.shape[3] in (window - 1, window)
    ):
        blocks, size, context = scores.shape[2:]
        starts = torch.arange(blocks).repeat_interleave(size) * size - (context - size)
        return _placed(scores[0].flatten(1, 2)[:, :count], starts[:count])[None]
    return None


def _placed(rows: Float[Tensor, "heads n width"], starts: Tensor) -> Float[Tensor, "heads n n"]:
    """Rows of scores, the first of which is that of the key `starts`, as rows of all keys."""
    heads, count, width = rows.shape
    keys = starts[:, None] + torch.arange(width)
    known = (keys >= 0) & (keys < count)
    full = rows.new_full((heads, count, count + 1), -torch.inf)  # the last column takes what lies outside
    index = torch.where(known, keys, count).expand(heads, -1, -1)
    return full.scatter(2, index, rows)[..., :count]
