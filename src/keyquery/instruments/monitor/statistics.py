"""Statistics of attention logits, streamed: the queries × keys matrix is never held, only blocks of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keyquery.layers.triton_support import no_kernels
from keyquery.listening.call import HIDDEN, Call, visible

# What the rows of the result hold, per head. Sums are over queries, so that batches can be merged.
STATISTICS = ("largest", "smallest", "entropy_sum", "sink_sum", "uniform_sum", "queries", "entry")
LARGEST, SMALLEST, ENTROPY, SINK, UNIFORM, QUERIES, ENTRY = range(7)
CELLS = 2**18  # logits of a block: they fit the cache
MANY_CELLS = 2**24  # the same of a GPU, where few large operations are faster
EVERY = slice(None)


@torch.no_grad()
def call_statistics(
    call: Call, rounding: torch.dtype | None = None, impl: str = "auto"
) -> Float[Tensor, "tiles 7 heads"]:
    """Largest and smallest logit and largest entry of every head, and sums over real queries, of tiles of queries.

    `rounding` is the dtype to which autocast rounds queries and keys; `impl` "reference" or "triton" takes one of both.
    `merge_statistics` joins tiles.
    """
    query, key = (side.detach() if rounding is None else side.detach().to(rounding) for side in (call.query, call.key))
    call = replace(call, query=query, key=key)
    fused = call.given_scores is None and call.softcap is None and call.sinks is None and call.scale is not None
    wanted = impl == "triton" or (impl == "auto" and query.is_cuda and query.dtype != torch.float64)
    reason = no_kernels(query)
    if impl == "triton" and reason:
        raise ValueError(f"impl 'triton' {reason}")
    if fused and wanted and reason is None:
        from keyquery.instruments.monitor.kernels import triton_statistics

        real = call.real_queries
        shown = query if real is None else query.where(real[:, None, :, None], 0.0)  # 0: not even a NaN counts
        mask = _merged_mask(call)
        parts = triton_statistics(shown, key, float(call.scale or 0.0), mask, call.causal == 0, _first_visible(mask))
    else:
        parts = _in_blocks(call).unsqueeze(0)
    entries = _entries(call).to(parts).expand(len(parts), 1, -1)
    return torch.cat((parts, entries), 1)


def merge_statistics(parts: Float[Tensor, "*layers tiles rows heads"]) -> Float[Tensor, "*layers rows heads"]:
    """Statistics of several tiles or batches as one, with or without the row of entries, which is the last."""
    largest, smallest, sums, entry = parts.split((1, 1, 4, parts.shape[-2] - 6), -2)
    return torch.cat((largest.amax(-3), smallest.amin(-3), sums.sum(-3), entry.amax(-3)), -2)


def part_of(call: Call, sequences: slice, heads: slice, queries: slice, keys: slice = EVERY) -> Call:
    """Some sequences, heads, queries and keys of a call, as far as its scores depend on them."""
    return replace(
        call,
        query=call.query[sequences, heads, queries],
        key=call.keys(heads)[sequences, :, keys],
        value=None,
        attn_mask=_cut(call.attn_mask, sequences, heads, queries, keys),
        position_bias=_cut(call.position_bias, sequences, heads, queries, keys),
        given_scores=_cut(call.given_scores, sequences, heads, queries, keys),
        causal=None if call.causal is None else call.causal + (queries.start or 0),
        sinks=None if call.sinks is None else call.sinks[heads],
    )


def _cut(tensor: Tensor | None, *parts: slice) -> Any:
    """A part of a tensor that is broadcast over (batch, heads, n, m)."""
    if tensor is None:
        return None
    tensor = tensor.detach().reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
    return tensor[tuple(EVERY if size == 1 else part for size, part in zip(tensor.shape, parts, strict=True))]


def _entries(call: Call) -> Float[Tensor, " heads"]:
    """The largest |entry| of real queries and of keys; NaN where these are not known."""
    if call.query.shape[-1] == 0:
        return call.query.new_full((call.heads,), torch.nan)
    real = call.real_queries
    query = call.query if real is None else call.query.where(real[:, None, :, None], 0.0)
    of_queries, of_keys = (torch.linalg.vector_norm(side, torch.inf, (0, 2, 3)) for side in (query, call.key))
    return torch.maximum(of_queries, of_keys.repeat_interleave(call.heads // call.key_heads))


def _merged_mask(call: Call) -> Tensor | None:
    """Mask, bias and real queries of a call as one mask, boolean or additive with hidden keys at −∞."""
    mask, bias, real = call.attn_mask, call.position_bias, call.real_queries
    shown = None if real is None else real[:, None, :, None]
    if call.causal:  # an offset that the kernel does not know
        n, m = call.query.shape[-2], call.key.shape[-2]
        past = torch.ones(n, m, dtype=torch.bool, device=call.query.device).tril(call.causal)
        shown = past if shown is None else shown & past
    if mask is not None and mask.dtype == torch.bool:
        shown = mask if shown is None else mask & shown
    elif mask is not None:
        hidden = mask.masked_fill(~visible(mask), -torch.inf)
        bias = hidden if bias is None else bias + hidden
    if bias is None or shown is None:
        return shown if bias is None else bias
    return bias.where(shown, -torch.inf)


def _first_visible(mask: Tensor | None) -> Int[Tensor, "#batch #heads"] | None:
    """The first key that any query sees: where sinks form, also behind left padding; None: key 0."""
    if mask is None:
        return None
    seen = visible(mask)
    return seen.reshape((1,) * (4 - seen.ndim) + tuple(seen.shape)).any(-2).to(torch.uint8).argmax(-1)


def _in_blocks(call: Call) -> Float[Tensor, "6 heads"]:
    """Statistics in plain torch, some sequences, heads and queries at a time."""
    real, first = call.real_queries, None
    mask = call.attn_mask if call.given_scores is None else call.given_scores
    if mask is not None:
        seen = visible(mask).reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        first = _first_visible(seen if real is None else seen & real[:, None, :, None])
    by_heads: dict[int, list[Tensor]] = {}
    for sequences, heads, queries in _blocks(call):
        block = part_of(call, sequences, heads, queries)
        size = block.query.shape[:2]
        start = None if first is None else first.expand(len(call.query), call.heads)[sequences, heads].expand(size)
        counted = None if real is None else real[sequences, queries]
        by_heads.setdefault(heads.start, []).append(_block_statistics(block, counted, start))
    return torch.cat([merge_statistics(torch.stack(parts)) for parts in by_heads.values()], -1)


def _blocks(call: Call) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of sequences, heads and queries, of about CELLS logits each."""
    (batch, heads, n), m = call.query.shape[:3], call.key.shape[-2]
    cells = MANY_CELLS if call.query.is_cuda else CELLS
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
        sinks = call.sinks.detach().to(raw)[None, :, None].expand_as(top)
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
