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
    """The equation itself."""
    symmetric, skew, popularity, query_only, position = gains.to(keys)[:, :, None, None]
    content, mean = queries - at_query, at_query[..., -new:, :]
    own, other = content[..., -new:, :], keys - at_key
    wide_query, wide_key = [(symmetric + skew) / 2 * own + popularity * mean], [other]
    if across:
        swapped = (content, other) if turn is None else (turn(content), turn(other))
        wide_query.append((symmetric - skew) / 2 * swapped[1][..., -new:, :])
        wide_key.append(swapped[0])
    if placed:
        wide_query.append(query_only * own + position * mean)
        wide_key.append(at_key.expand_as(keys))
    return torch.cat(wide_query, -1), torch.cat(wide_key, -1)
