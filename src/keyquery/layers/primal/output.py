"""The linear maps after the scores: that of [e; r] of every head, folded into what stands around it, and the output.

Both are `nn.Linear`s, unless a user has put another module there.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from keyquery.layers.primal.inputs import untouched


def mixing(concat: Any, directions: Float[Tensor, "2 heads rows s"]) -> Float[Tensor, "2 s v"]:
    """Cₑ and Cᵣ of the linear map of [e; r]; where that must be called as a module, a map that changes nothing."""
    rank = directions.shape[-1]
    if untouched(concat):
        return concat.weight.unflatten(1, (2, rank)).permute(1, 2, 0)
    return torch.eye(2 * rank, dtype=directions.dtype, device=directions.device).unflatten(0, (2, rank))


def merge(
    out: Float[Tensor, "batch n heads v"], concat: Any, output: Any, real: Bool[Tensor, "batch n"] | None
) -> Float[Tensor, "batch n dim"]:
    """W(o + b) + c, b that of the map of [e; r], as Wo + (Wb + c): a vector is added in o's place. Padding gives 0."""
    joined = _joined(out, concat, output)
    return joined if real is None else joined.where(real.unsqueeze(-1), 0.0)


def _joined(out: Tensor, concat: Any, output: Any) -> Tensor:
    if not untouched(concat):
        return output(concat(out).flatten(2))
    heads, out = out.shape[2], out.flatten(2)
    if concat.bias is None:
        return output(out)
    offset = concat.bias.repeat(heads)
    if not untouched(output):
        return output(out + offset.to(out.dtype))
    offset = output.weight @ offset
    return linear(out, output.weight, offset if output.bias is None else offset + output.bias)
