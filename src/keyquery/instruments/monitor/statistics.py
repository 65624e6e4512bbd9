"""Statistics of attention logits, streamed: the queries × keys matrix is never held, only blocks of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keyquery.listening.call import HIDDEN, Call, visible

# What the rows of the result hold, per head. Sums are over queries, so that batches can be merged.
STATISTICS = ("largest", "smallest", "entropy_sum", "sink_sum", "uniform_sum", "queries")
LARGEST = STATISTICS.index("largest")
CELLS = 2**18  # logits of a block: they fit the cache
GPU_CELLS = 2**24  # there few large operations are faster


@torch.no_grad()
def call_statistics(call: Call, rounding: torch.dtype | None = None) -> Float[Tensor, "6 heads"]:
    """Largest and smallest logit of every head, and sums over real queries; autocast rounds queries and keys."""
    call = replace(call.detached(), value=None)
    if rounding is not None:
        call = replace(call, query=call.query.to(rounding), key=call.key.to(rounding))
    real, first = call.real_queries, None
    mask = call.attn_mask if call.given_scores is None else call.given_scores
    if mask is not None:
        seen = visible(mask).reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        seen = seen if real is None else seen & real[:, None, :, None]
        # The first key that any query sees: where sinks form, also behind left padding.
        first = seen.any(-2).to(torch.uint8).argmax(-1).expand(len(call.query), call.heads)
    by_heads: dict[int, list[Tensor]] = {}
    for sequences, heads, queries in _blocks(call):
        block = call.part(sequences, queries, heads)
        start = None if first is None else first[sequences, heads]
        counted = None if real is None else real[sequences, queries]
        by_heads.setdefault(heads.start, []).append(_block_statistics(block, counted, start))
    return torch.cat([merge_statistics(parts) for parts in by_heads.values()], -1)


def merge_statistics(parts: list[Float[Tensor, "6 heads"]]) -> Float[Tensor, "6 heads"]:
    """Statistics of several blocks or calls as one."""
    table = torch.stack(parts)
    return torch.cat((table[:, :1].amax(0), table[:, 1:2].amin(0), table[:, 2:].sum(0)))


def _blocks(call: Call) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of sequences, heads and queries, of about CELLS logits each."""
    (batch, heads, n), m = call.query.shape[:3], call.key.shape[-2]
    cells = GPU_CELLS if call.query.is_cuda else CELLS
    many, some, few = (max(cells // size, 1) for size in (heads * n * m, n * m, m))
    for head in range(0, heads, some):
        for sequence in range(0, batch, many):
            for query in range(0, n, few):
                yield slice(sequence, sequence + many), slice(head, head + some), slice(query, query + few)


def _block_statistics(
    call: Call, real: Bool[Tensor, "batch n"] | None, first: Int[Tensor, "batch heads"] | None
) -> Float[Tensor, "6 heads"]:
    raw, hidden = _scores(call)
    scores, smallest = raw, None  # with hidden keys at −∞
    shown = torch.ones_like(raw[..., 0], dtype=torch.bool)
    count: Any = torch.full_like(raw[:1, :1, :1, 0], raw.shape[-1])
    if hidden is not None:
        count = (~hidden).sum(-1)
        shown = shown & (count > 0)
        barrier = torch.zeros_like(hidden, dtype=raw.dtype).masked_fill(hidden, -torch.inf)
        scores, smallest = raw + barrier, (raw - barrier).amin(-1)
    shown = shown if real is None else shown & real[:, None]
    top, smallest = scores.amax(-1), raw.amin(-1) if smallest is None else smallest
    base, beside = top, torch.zeros_like(top)
    if call.sinks is None:
        weights = scores.softmax(-1)
        total = weights.amax(-1).log().neg()  # the largest weight is 1/Σ
    else:  # learned sinks take part in the softmax
        sinks = call.sinks.to(raw)[None, :, None].expand_as(top)
        joint = torch.cat((scores, sinks[..., None]), -1).softmax(-1)
        weights, total, count = joint[..., :-1], joint.amax(-1).log().neg(), count + 1
        base = torch.maximum(top, sinks)
        beside = joint[..., -1] * (sinks - base)
    # Of differences of logits: large ones would cancel.
    entropy = total - raw.sub_(base[..., None]).mul_(weights).sum(-1) - beside
    if first is None:
        sink = weights[..., 0]
    else:
        sink = weights.gather(-1, first[:, :, None, None].expand(*shown.shape, 1)).squeeze(-1)
    uniform = count.to(raw).clamp(min=1).log().expand_as(sink)
    sums = torch.stack((entropy, sink, uniform, torch.ones_like(sink))).where(shown, 0.0).sum((1, 3))
    extremes = top.where(shown, -torch.inf).amax((0, 2)), smallest.where(shown, torch.inf).amin((0, 2))
    return torch.cat((torch.stack(extremes), sums))


def _scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Scores of a block, and which keys are hidden; a NaN must not be taken for a hidden key."""
    if call.given_scores is None:
        hidden = None if call.mask is None else ~call.mask
        return replace(call, attn_mask=None, causal=None, position_bias=call.bias).scores(), hidden
    scores = call.given_scores.to(torch.promote_types(call.given_scores.dtype, torch.float32))
    hidden = scores <= HIDDEN
    return scores.masked_fill(hidden, 0.0), hidden
