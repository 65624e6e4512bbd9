"""Scaling of the rows of two factors by powers of two, which is exact, to avoid over- and underflow.

qᵀk = (cq)ᵀ(k/c) for each pair of rows and any c. Sums and differences of q and k are only as exact as the longer of the
two, so both get equal length. Tied and nearly tied rows are unchanged.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def row_exponents(rows: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows 1"]:
    """⌊log₂⌋ of the largest entry of each row, float64; 0 for a row of zeros. A constant to autograd.

    At most 1000 in size, so that 2 to that power and its inverse are numbers of float64.

    >>> row_exponents(torch.tensor([[1.0, -8.0], [0.0, 0.0]]))
    tensor([[3.],
            [0.]], dtype=torch.float64)
    """
    return _logs(rows).floor().nan_to_num(neginf=0.0).clamp(-1000, 1000)


def times(tensor: Tensor, exponents: Tensor) -> Tensor:
    """tensor · 2^exponents in the tensor's dtype; in two steps where one power would be beyond its range.

    >>> times(torch.tensor([3.0]), torch.tensor([-2.0]).double())
    tensor([0.7500])
    """
    if not exponents.is_meta and exponents.abs().max() < math.log2(torch.finfo(tensor.dtype).max) - 2:
        return tensor * exponents.exp2().to(tensor.dtype)
    first = (exponents / 2).trunc()
    return tensor * first.exp2().to(tensor.dtype) * (exponents - first).exp2().to(tensor.dtype)


def balance(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The same form with each pair of rows scaled to equal length, in their own dtype."""
    lift, _ = _lift_and_unit(_logs(query), _logs(key), query.dtype)
    return times(query, lift), times(key, -lift)


def balanced(
    query: Tensor, key: Tensor, size_query: Tensor | float = 0.0, size_key: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of equal length, the longest about 1, of the factors 2^size·rows: query, key, lift, unit.

    The result is the factors' query times 2^(lift − unit) and their key times 2^(−lift − unit): their form is M/4^unit.
    """
    lift, unit = _lift_and_unit(_logs(query) + size_query, _logs(key) + size_key, query.dtype)
    return times(query, size_query + lift - unit), times(key, size_key - lift - unit), lift, unit


def halved(covariance: Float[Tensor, "d d"]) -> tuple[Float[Tensor, "d d"], Float[Tensor, ""]]:
    """Σ/4^size with entries near 1, and size: tokens divided by 2^size have this covariance."""
    size = (_logs(covariance.flatten()) / 2).floor().nan_to_num(neginf=0.0).squeeze(-1)
    return times(covariance, -2 * size), size


def _lift_and_unit(query: Tensor, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Exponents of 2 by which query rows grow and key rows shrink, and the size of the largest pair."""
    unit = ((query + key) / 2).round().amax(-2, keepdim=True).nan_to_num(neginf=0.0)
    lift = (key - query) / 2
    # A row whose partner is zero adds nothing to M but rounding: it is shrunk far below the others.
    faint = unit - math.log2(torch.finfo(dtype).max) // 2
    lift = lift.where(~query.isneginf(), key - faint).where(~key.isneginf(), faint - query)
    return lift.round().nan_to_num(posinf=0.0, neginf=0.0), unit


def _logs(rows: Tensor) -> Tensor:
    """log₂ of the largest entry of each row (..., 1), float64; −∞ for a row of zeros."""
    return rows.detach().abs().amax(-1, keepdim=True).double().log2()
