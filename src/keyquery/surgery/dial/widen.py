"""Wide queries and keys whose product is a score with gains on its parts; see `dial` for the equation.

The reference and the Triton kernel have the same signature. With gradients, the reference is used.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.layers.triton_support import no_kernels
from keyquery.support.checks import check_choice

IMPLEMENTATIONS = ("auto", "reference", "triton")


def widen(
    queries: Float[Tensor, "batch heads m r"],
    keys: Float[Tensor, "batch heads m r"],
    at_query: Float[Tensor, "#batch heads m r"],
    at_key: Float[Tensor, "#batch heads m r"],
    gains: Float[Tensor, "5 heads"],
    new: int,
    across: bool,
    placed: bool,
    swapped: tuple[Float[Tensor, "batch heads m r"], Float[Tensor, "batch heads m r"]] | None = None,
    impl: str = "auto",
) -> tuple[Float[Tensor, "batch heads n w"], Float[Tensor, "batch heads m w"]]:
    """q̃ of the last `new` tokens and k̃ of all m; `at_query` and `at_key` are the means, rotated to every position.

    The block of swapped contents is present if `across`, not needed if the gains on symmetric and skew are equal; that
    of position if `placed`. `swapped` are the contents of queries and keys rotated by the negative angle. Default:
    unrotated, which is right without RoPE. "auto" uses the kernel on a GPU without gradients, except for float64.

    >>> q, k = torch.randn(2, 1, 1, 3, 4)
    >>> wide_q, wide_k = widen(q, k, 0 * q, 0 * k, torch.tensor([[1.0], [0.0], [1.0], [1.0], [1.0]]), 3, True, False)
    >>> scores = wide_q @ wide_k.mT
    >>> bool((scores - scores.mT).abs().max() < 1e-5)
    True
    """
    check_choice("impl", impl, IMPLEMENTATIONS)
    inputs = (queries, keys, at_query, at_key)
    all_inputs = inputs if swapped is None else (*inputs, *swapped)
    why = no_kernels(queries)
    if queries.dtype == torch.float64:
        why = "is not for float64, since it sums in float32"
    elif torch.is_grad_enabled() and any(t.requires_grad for t in all_inputs):
        why = "has no backward"
    if impl == "triton" and why is not None:
        raise RuntimeError(f'impl="triton" {why}; impl="auto" uses the reference there')
    if impl == "triton" or (impl == "auto" and queries.is_cuda and why is None):
        from keyquery.surgery.dial.widen_triton import widen as fast  # imports triton, an optional dependency

        return fast(*inputs, gains, new, across, placed, swapped)
    return _reference(*inputs, gains, new, across, placed, swapped)


def _reference(
    queries: Tensor,
    keys: Tensor,
    at_query: Tensor,
    at_key: Tensor,
    gains: Tensor,
    new: int,
    across: bool,
    placed: bool,
    swapped: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Each block as gain·x + shift in one pass."""
    symmetric, skew, popularity, query_only, position = gains.to(keys)[:, :, None, None]
    both = (symmetric + skew) / 2
    apart = (symmetric - skew) / 2
    ones = torch.ones_like(symmetric)
    own_query, n = queries[..., -new:, :], slice(-new, None)
    mean = at_query[..., n, :]
    wide_query = [(both, own_query, (popularity - both) * mean)]
    wide_key = [(ones, keys, -at_key)]
    if across and swapped is None:
        wide_query.append((apart, keys[..., n, :], -apart * at_key[..., n, :]))
        wide_key.append((ones, queries, -at_query))
    elif across and swapped is not None:
        nothing = torch.zeros_like(own_query[:1, ..., :1])
        wide_query.append((apart, swapped[1][..., n, :], nothing))
        wide_key.append((ones, swapped[0], torch.zeros_like(keys[:1, ..., :1])))
    if placed:
        wide_query.append((query_only, own_query, (position - query_only) * mean))
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
