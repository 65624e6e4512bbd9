"""Statistics of attention logits, streamed: the queries × keys matrix is never held, only blocks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.layers.triton_support import no_kernels
from keyquery.listening.call import HIDDEN
from keyquery.support.checks import check_choice

# Rows of the result: what each holds per head. Sums are over queries, so that batches can be merged.
LARGEST, SMALLEST, ENTROPY, SINK, UNIFORM, QUERIES, ENTRY = range(7)
BUDGET = 2**21  # logits per block of the reference
IMPLS = ("auto", "reference", "triton")


def logit_statistics(
    query: Float[Tensor, "batch heads n r"],
    key: Float[Tensor, "batch kv m r"],
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    impl: str = "auto",
    rows: Bool[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "7 heads"]:
    """Largest and smallest logit and largest entry of every head, and sums over queries of entropy and attention
    sink.
    """
    return merge_statistics(statistics_by_tile(query, key, scale, mask, causal, impl, rows))


def statistics_by_tile(
    query: Float[Tensor, "batch heads n r"],
    key: Float[Tensor, "batch kv m r"],
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    impl: str = "auto",
    rows: Bool[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "tiles 7 heads"]:
    """`logit_statistics` of tiles of queries; `merge_statistics` can then join those of many layers at once."""
    check_choice("impl", impl, IMPLS)
    reason = no_kernels(query)
    if impl == "triton" and reason:
        raise ValueError(f"impl 'triton' {reason}")
    if rows is not None:
        query, mask = query.where(rows[:, None, :, None], 0.0), _of_rows(mask, rows)  # 0: not even a NaN counts
    if impl == "triton" or (impl == "auto" and reason is None and query.is_cuda and query.dtype != torch.float64):
        from keyquery.instruments.monitor.kernels import triton_statistics

        return triton_statistics(query, key, scale, mask, causal, first_visible(query, mask))
    with torch.autocast(query.device.type, enabled=False):
        return with_entries(_reference(query, key, scale, mask, causal), query, key).unsqueeze(0)


def _of_rows(mask: Tensor | None, rows: Bool[Tensor, "batch n"]) -> Tensor:
    """A mask in which other queries see nothing; without a copy if there is no other."""
    shown = rows[:, None, :, None]
    if mask is None:
        return shown
    return mask & shown if mask.dtype == torch.bool else mask.where(shown, -torch.inf)


def merge_statistics(parts: Float[Tensor, "*layers parts rows heads"]) -> Float[Tensor, "*layers rows heads"]:
    """Statistics of several batches as one, with or without the row of entries, which is the last."""
    if parts.shape[-3] == 1:
        return parts.squeeze(-3)
    largest, smallest, sums, entry = parts.split((1, 1, 4, parts.shape[-2] - 6), -2)
    return torch.cat((largest.amax(-3), smallest.amin(-3), sums.sum(-3), entry.amax(-3)), -2)


def with_entries(statistics: Float[Tensor, "6 heads"], query: Tensor, key: Tensor) -> Float[Tensor, "7 heads"]:
    """Statistics with the largest |entry| of queries and keys."""
    entries, of_keys = (torch.linalg.vector_norm(side, torch.inf, (0, 2, 3)) for side in (query, key))
    shared = query.shape[1] // key.shape[1]
    entries = torch.maximum(entries, of_keys.repeat_interleave(shared) if shared > 1 else of_keys)
    return torch.cat((statistics, entries.to(statistics).unsqueeze(0)))


def hidden_below(dtype: torch.dtype, scale: float) -> float:
    """Logits below this are of masked keys; `kq.Attention` and others hide padding by a huge negative term."""
    return float(torch.finfo(dtype).min) * min(scale, 1.0) / 8


def first_visible(query: Tensor, mask: Tensor | None) -> Tensor | None:
    """The first key that any query sees, (#batch, #heads): where sinks form, also behind left padding; None: key 0."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = seen.reshape((1,) * (4 - seen.ndim) + tuple(seen.shape))
    return seen.any(-2).to(torch.uint8).argmax(-1)


def statistics_of_logits(
    logits: Float[Tensor, "batch heads n m"],
    rows: Bool[Tensor, "batch n"] | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "6 heads"]:
    """The same, without entries, of logits that a model has computed itself; masked ones are below `HIDDEN`.

    Learned `sinks` take part in the softmax, and count for the entropy alone.
    """
    batch, heads, n, m = logits.shape
    flat = logits.flatten(0, 1)
    counted = None if rows is None else rows.repeat_interleave(heads, 0)
    blocks = list(_blocks(batch * heads, n, m))
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32

    def block(chosen: slice, part: slice) -> Tensor:
        values = flat[chosen, part].to(wide)
        return values if counted is None else values.where(counted[chosen, part, None], -torch.inf)

    tops = [block(*where).amax(-2) for where in blocks]
    seen = ~(_by_rows(tops, blocks, lambda parts: parts.amax(0)) <= HIDDEN)  # also NaN
    first = seen.to(torch.uint8).argmax(-1)
    column = None if sinks is None else sinks.to(flat.device, wide).repeat(batch)
    parts = [
        _block(block(*where), HIDDEN, first[where[0]], None if column is None else column[where[0]]) for where in blocks
    ]
    return _joined(parts, blocks, heads)


def _reference(query: Tensor, key: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    batch, heads, n, _ = query.shape
    m, shared = key.shape[-2], heads // key.shape[1]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    low = hidden_below(query.dtype, scale)
    first = first_visible(query, mask)
    blocks, parts = list(_blocks(batch * heads, n, m)), []
    every = torch.arange(batch * heads, device=query.device)
    for rows, part in blocks:
        sequence, head = every[rows] // heads, every[rows] % heads
        logits = query[sequence, head, part].to(wide) * scale @ key[sequence, head // shared].to(wide).mT
        queries = torch.arange(n, device=query.device)[part]
        if mask is not None:
            seen = mask.expand(batch, heads, n, m)[sequence, head, part]
            logits = logits.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else logits + seen.to(wide)
        if causal:
            logits = logits.masked_fill(torch.arange(m, device=query.device) > queries[:, None], -torch.inf)
        start = torch.zeros_like(head) if first is None else first.expand(batch, heads)[sequence, head]
        parts.append(_block(logits, low, start))
    return _joined(parts, blocks, heads)


def _blocks(count: int, n: int, m: int) -> Iterator[tuple[slice, slice]]:
    """Slices of heads and of queries, of at most BUDGET logits each."""
    many = max(BUDGET // (n * m), 1)
    rows = n if many > 1 else max(BUDGET // m, 1)
    for first in range(0, count, many):
        for start in range(0, n, rows):
            yield slice(first, first + many), slice(start, start + rows)


def _block(
    logits: Float[Tensor, "c rows m"], low: float, first: Tensor, sinks: Tensor | None = None
) -> Float[Tensor, "6 c"]:
    visible = logits > low
    visible |= logits.isnan()  # a NaN must not be taken for a masked key
    hidden = ~visible
    any_visible = visible.any(-1)
    shown = logits.masked_fill(hidden, -torch.inf)
    top = shown.amax(-1, keepdim=True)
    base = top if sinks is None else torch.maximum(top, sinks[:, None, None])
    apart = shown.sub_(base)  # of the logits themselves, large ones would cancel in the entropy
    weights = apart.exp()
    total = weights.sum(-1)
    weighted = (weights * apart.masked_fill_(hidden, 0.0)).sum(-1)
    if sinks is not None:
        rest = sinks[:, None] - base.squeeze(-1)
        total, weighted = total + rest.exp(), weighted + rest.exp() * rest
    entropy = total.log() - weighted / total
    sink = weights.gather(-1, first[:, None, None].expand(-1, logits.shape[1], 1)).squeeze(-1) / total
    uniform = (visible.sum(-1).clamp(min=1) + (sinks is not None)).to(logits.dtype).log()
    sums = [total.masked_fill(~any_visible, 0.0).sum(-1) for total in (entropy, sink, uniform)]
    smallest = logits.masked_fill(hidden, torch.inf)
    return torch.stack([top.amax((-2, -1)), smallest.amin((-2, -1)), *sums, any_visible.sum(-1).to(logits.dtype)])


def _joined(parts: list[Tensor], blocks: list[tuple[slice, slice]], heads: int) -> Tensor:
    """Blocks of flattened (batch, heads) rows, merged per head."""
    flat = _by_rows([part.mT for part in parts], blocks, lambda same: merge_statistics(same.mT).mT).mT
    return merge_statistics(flat.unflatten(-1, (-1, heads)).transpose(0, 1))


def _by_rows(
    parts: list[Tensor], blocks: list[tuple[slice, slice]], merge: Callable[[Tensor], Tensor]
) -> Float[Tensor, "rows any"]:
    """Blocks of the same rows and other queries merged, and all rows joined."""
    by_rows: dict[int, list[Tensor]] = {}
    for part, (rows, _) in zip(parts, blocks, strict=True):
        by_rows.setdefault(rows.start, []).append(part)
    return torch.cat([merge(torch.stack(same)) for same in by_rows.values()])
