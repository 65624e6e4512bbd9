"""Which keys a query sees, in scores with a mask added."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
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


def _distances(n: int) -> Int[Tensor, "n n"]:
    return (torch.arange(n) - torch.arange(n)[:, None]).abs()
