"""Wide queries and keys whose product is a score with gains on its parts; see `dial` for the equation.

The reference and the Triton kernel have the same signature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.layers.triton_support import TRITON


class HalfTurn(NamedTuple):
    """R(−2t), which takes vectors rotated by t to those rotated by −t: cosines and sines of 2t per position and pair.

    Pairs begin at dimension `start`.
    """

    cos: Float[Tensor, "#batch m pairs"]
    sin: Float[Tensor, "#batch m pairs"]
    start: int
    interleaved: bool

    def __call__(self, x: Float[Tensor, "batch heads m r"]) -> Float[Tensor, "batch heads m r"]:
        """R(−2t)·x."""
        cos, sin = (table.unsqueeze(1).to(x.dtype) for table in (self.cos, self.sin))
        before, turned, after = x.split(
            [self.start, 2 * cos.shape[-1], x.shape[-1] - self.start - 2 * cos.shape[-1]], -1
        )
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        pair = a * cos + b * sin, b * cos - a * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((before, turned, after), -1)


def widen(
    queries: Float[Tensor, "batch heads m r"],
    keys: Float[Tensor, "batch heads m r"],
    at_query: Float[Tensor, "#batch heads m r"],
    at_key: Float[Tensor, "#batch heads m r"],
    gains: Float[Tensor, "5 heads"],
    new: int,
    across: bool,
    placed: bool,
    turn: HalfTurn | None = None,
) -> tuple[Float[Tensor, "batch heads n w"], Float[Tensor, "batch heads m w"]]:
    """q̃ of the last `new` tokens and k̃ of all m; `at_query` and `at_key` are the means, rotated to every position.

    The block of swapped contents is present if `across`, not needed if the gains on symmetric and skew are equal; that
    of position if `placed`. `turn` rotates swapped contents by the negative angle; None without RoPE. The kernel is
    used on a GPU, for what it is made for: no gradients, float32 sums, RoPE of all dimensions in halves.
    """
    given = (queries, keys, at_query, at_key, gains, new, across, placed, turn)
    rank, tracked = queries.shape[-1], torch.is_grad_enabled() and any(t.requires_grad for t in given[:4])
    in_halves = turn is None or (not turn.interleaved and 2 * turn.cos.shape[-1] == rank)
    if queries.is_cuda and TRITON and not tracked and queries.dtype != torch.float64 and rank % 2 == 0 and in_halves:
        from keyquery.intervene.dial import widen_triton  # imports triton, an optional dependency

        return widen_triton.widen(*given)
    return reference(*given)


def reference(
    queries: Tensor,
    keys: Tensor,
    at_query: Tensor,
    at_key: Tensor,
    gains: Tensor,
    new: int,
    across: bool,
    placed: bool,
    turn: HalfTurn | None = None,
) -> tuple[Tensor, Tensor]:
    """Each block as gain·x + shift in one pass."""
    symmetric, skew, popularity, query_only, position = gains.to(keys)[:, :, None, None]
    both = (symmetric + skew) / 2
    apart = (symmetric - skew) / 2
    ones = torch.ones_like(symmetric)
    new_query, n = queries[..., -new:, :], slice(-new, None)
    mean = at_query[..., n, :]
    wide_query = [(both, new_query, (popularity - both) * mean)]
    wide_key = [(ones, keys, -at_key)]
    if across and turn is None:
        wide_query.append((apart, keys[..., n, :], -apart * at_key[..., n, :]))
        wide_key.append((ones, queries, -at_query))
    elif across and turn is not None:
        nothing = torch.zeros_like(new_query[:1, ..., :1])
        wide_query.append((apart, turn(keys - at_key)[..., n, :], nothing))
        wide_key.append((ones, turn(queries - at_query), torch.zeros_like(keys[:1, ..., :1])))
    if placed:
        wide_query.append((query_only, new_query, (position - query_only) * mean))
        wide_key.append((torch.zeros_like(ones), keys, at_key))
    return _side_by_side(wide_query), _side_by_side(wide_key)


def _side_by_side(blocks: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """gain·x + shift of every block, concatenated; written in place without gradients."""
    if torch.is_grad_enabled() and any(t.requires_grad for block in blocks for t in block):
        return torch.cat([torch.addcmul(shift, gain, x) for gain, x, shift in blocks], -1)
    width = blocks[0][1].shape[-1]
    out = blocks[0][1].new_empty(*blocks[0][1].shape[:-1], width * len(blocks))
    for part, (gain, x, shift) in zip(out.split(width, -1), blocks, strict=True):
        torch.addcmul(shift, gain, x, out=part)
    return out
