"""The linear maps after the scores: that of [e; r], folded into the neighbouring products, and the output.

Both are `nn.Linear`s, unless a user has replaced them.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from keyquery.learn.layers.primal.inputs import untouched


def mixing(concat: Any, directions: Float[Tensor, "2 heads rows s"]) -> Float[Tensor, "2 s v"]:
    """Cₑ and Cᵣ of the linear map of [e; r]; the identity if it must be called as a module."""
    rank = directions.shape[-1]
    if untouched(concat):
        return concat.weight.unflatten(1, (2, rank)).permute(1, 2, 0)
    return torch.eye(2 * rank, dtype=directions.dtype, device=directions.device).unflatten(0, (2, rank))


def merge(
    out: Float[Tensor, "batch n heads v"], concat: Any, output: Any, real: Bool[Tensor, "batch n"] | None
) -> Float[Tensor, "batch n dim"]:
    """W(o + b) + c, b the bias of the map of [e; r], as Wo + (Wb + c). Padding gives 0."""
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
