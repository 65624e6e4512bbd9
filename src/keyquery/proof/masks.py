"""Which keys a query sees, in scores with a mask added; and scores of local attention by query and key."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keyquery.checkpoints import Layer

HIDDEN = -60.0  # masks lie below, scores of tiny models above


def mask_error(theirs: Tensor, layer: Layer) -> str:
    """What is wrong about which keys a query sees, if anything."""
    n, m = theirs.shape[-2:]
    if n != m or layer.kind != "self":
        return ""
    seen = (theirs > HIDDEN).any(0).any(0)
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    if layer.causal and bool((seen & future).any()):
        return "causal, but queries see later keys"
    if not layer.causal and n > 2 and not bool((seen & future).any()):
        return "not causal, but no query sees a later key"
    chunk = chunk_size(seen)
    if chunk is not None or layer.chunk is not None:
        same = layer.chunk is None or not bool((seen & ~_in_chunks(n, layer.chunk)).any())
        return (
            ""
            if same and chunk in (None, layer.chunk)
            else f"chunks of {layer.chunk}, but queries see those of {chunk}"
        )
    size, far = sliding_window(seen), _distances(n)
    if layer.window is not None and bool((seen & (far >= layer.window)).any()):
        return f"window of {layer.window}, but queries see keys that are further away"
    if size is not None and size != layer.window:
        return f"window of {layer.window or 'all'}, but queries see only keys less than {size} tokens away"
    return ""


def sliding_window(seen: Bool[Tensor, "n n"]) -> int | None:
    """The size of a sliding window, if that is what a mask is: all keys less than so many tokens away, and no
    others.
    """
    n, far = len(seen), _distances(len(seen))
    size = int(far[seen].max()) + 1 if bool(seen.any()) else n
    window = far < size
    window = window if bool(seen.triu(1).any()) else window.tril()
    return size if 1 < size < n - 1 and torch.equal(seen, window) else None


def chunk_size(seen: Bool[Tensor, "n n"]) -> int | None:
    """The size of chunks, if a mask shows all earlier keys of a query's chunk and no others."""
    causal = torch.ones_like(seen).tril()
    return next((size for size in range(2, len(seen)) if torch.equal(seen, causal & _in_chunks(len(seen), size))), None)


def _in_chunks(n: int, size: int) -> Bool[Tensor, "n n"]:
    chunk = torch.arange(n) // size
    return chunk[:, None] == chunk


def _distances(n: int) -> Int[Tensor, "n n"]:
    return (torch.arange(n) - torch.arange(n)[:, None]).abs()


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
