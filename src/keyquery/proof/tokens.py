"""The tokens of a softmax: what entered the projections of its queries and keys, window by window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyquery.checkpoints import Layer
from keyquery.listening.products import Softmax
from keyquery.listening.softmaxes import Capture


@dataclass(frozen=True)
class Tokens:
    """The tokens of a softmax: (windows, n, d) of queries and of keys, and the number of the first among all."""

    x: Tensor
    y: Tensor
    first: int = 0
    queries: int = 0  # of each window, where several tokens share a query


def entered(capture: Capture, module: str, time: int, which: int, like: Softmax | None = None) -> Tensor | None:
    """Tokens that entered a projection, as many as a softmax has keys; of an attention module, its queries or keys."""
    call = capture.before(module, time)
    while like and call and call.inputs and call.inputs[0].shape[-2] != like.scores.shape[-1]:
        call = capture.before(module, call.time)
    if call is None:
        return None
    values = [*call.inputs, *call.names.values()]
    values = [value for value in values if value.ndim == values[0].ndim]  # no masks
    named = call.names.get("query" if which == 0 else "key")
    chosen = named if named is not None else values[min(which, len(values) - 1)] if len(values) > 2 else None
    return values[0] if chosen is None and values else chosen


def windows(x: Tensor, y: Tensor, event: Softmax, layer: Layer, capture: Capture, module: str) -> Tokens:
    """The tokens of a softmax that entered a projection, in windows where it has rows for all of them.

    Otherwise they are part of the tokens, and follow those of the softmaxes since the projection was called.
    """
    x, y = (_channels_last(t, layer) for t in (x, y))
    rows, columns = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    m = event.scores.shape[-1]
    n = event.scores.numel() // (m * layer.heads)
    if n == m < len(rows) == len(columns) and not layer.pool:
        call = capture.before(module, event.time)
        since = [e for e in capture.events if call and e.owner == event.owner and call.time < e.time < event.time]
        first = sum(other.scores.shape[-1] for other in since)
        return Tokens(rows[first : first + n][None], columns[first : first + n][None], first)
    count = len(columns) // m if len(columns) >= m and len(columns) % m == 0 else 1
    if len(rows) % count:
        count = 1
    if layer.pool == "strided":  # the tokens of a window are `count` apart
        cut = [t.reshape(-1, count, t.shape[-1]).transpose(0, 1) for t in (rows, columns)]
    else:
        cut = [t.reshape(count, -1, t.shape[-1]) for t in (rows, columns)]
    return Tokens(cut[0], cut[1], queries=n // count)


def _channels_last(tokens: Tensor, layer: Layer) -> Tensor:
    """Tokens (batch, n, d) of an image (batch, d, height, width), as a convolution takes it."""
    width = layer.weights.query.shape[-1]
    image = tokens.ndim == 4 and tokens.shape[-1] != width and tokens.shape[1] == width
    return tokens.flatten(2).mT if image else tokens


def pooled(query: Tensor, count: int, how: str) -> Tensor:
    """Queries (..., n, r) that are merged to `count`: the largest of several, feature by feature."""
    n, rank = query.shape[-2:]
    if count == n:
        return query
    if how == "strided":
        return query.unflatten(-2, (n // count, count)).amax(-3)
    side, by = math.isqrt(n), math.isqrt(n // count)
    blocks = query.reshape(*query.shape[:-2], side // by, by, side // by, by, rank)
    return blocks.amax((-4, -2)).flatten(-3, -2)


def own_window(event: Softmax, ours: Tensor) -> Tensor:
    """Of scores in several windows, those of the window that a softmax is of, where each has a softmax of its own."""
    count = len(ours)
    if count == 1 or event.scores.numel() * count != ours.numel():
        return ours
    theirs = event.scores.reshape(ours.shape[1:]).double()
    theirs = theirs - theirs.mean(-1, keepdim=True)
    distances = [(theirs - (ours_of - ours_of.mean(-1, keepdim=True))).abs().max() for ours_of in ours.double()]
    best = int(torch.stack(distances).argmin())
    return ours[best : best + 1]
