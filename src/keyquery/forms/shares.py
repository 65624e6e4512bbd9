"""Shares of the variance of a head's scores over independent tokens, in closed form, from the moments of [q; k].

With q = q̄ + q′ and k = k̄ + k′, means over all tokens, the score is a sum of the same parts as in `forms.parts`, each
mean the same at every position. Tokens are assumed to be independent, so that parts do not covary, and the mean of each
query over its visible offsets is subtracted. This is what the weights imply under an assumed covariance; the shares on
real text are measured over its token pairs (`capture.scores`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.forms.form import Form
from keyquery.forms.measures import entropy_rank
from keyquery.forms.parts import PARTS
from keyquery.forms.rope import Rope, energies, rotations


@dataclass(frozen=True)
class Visible:
    """Which offsets a query sees in a text of `length` tokens: all, or earlier ones (causal), maybe in a window."""

    length: int
    causal: bool
    window: int | None = None

    def offsets(self, device: Any = None) -> Int[Tensor, " offsets"]:
        """Every offset that occurs, ascending."""
        reach = min(self.length, self.window or self.length) - 1
        return torch.arange(-reach, 1 if self.causal else reach + 1, device=device)

    def seen(self, device: Any = None) -> Float[Tensor, "length offsets"]:
        """Which offsets each query sees, 0 or 1."""
        keys = torch.arange(self.length, device=device)[:, None] + self.offsets(device)
        return ((keys >= 0) & (keys < self.length)).double()


def shares(
    mean: Float[Tensor, "heads n"],
    covariance: Float[Tensor, "heads n n"],
    scale: float,
    visible: Visible,
    rope: Rope | None = None,
    bias: Float[Tensor, "heads offsets"] | None = None,
) -> dict[str, Float[Tensor, " heads"]]:
    """Shares of the parts of every head, from the moments of [q; k]; beside them `symmetry` of the pairwise part.

    `bias` is the term that the model adds to the scaled score by offset (ALiBi, T5). Shares sum to 1; `interaction` is
    0 by assumption; position and query_only are exactly 0 if the scores have no positional term.
    """
    rank = mean.shape[-1] // 2
    query_mean, key_mean = mean[..., :rank], mean[..., rank:]
    of_query, of_key = covariance[..., :rank, :rank], covariance[..., rank:, rank:]
    offsets, seen = visible.offsets(mean.device), visible.seen(mean.device)  # a copy to a GPU would wait for it
    # A query sees m keys, and their mean score is subtracted: 1 − 1/m of the variance of a content term remains.
    weight = ((1 - 1 / seen.sum(1)) @ seen) / seen.sum()
    turns = rotations(rope, offsets, rank)
    energy = energies(covariance, rope, offsets.double())
    # ‖½(M ± Mᵀ)‖² at each offset: contents are swapped, the offset stays.
    symmetric, skew = (torch.einsum("o,oh->h", weight, (energy.there + sign * energy.contents) / 2) for sign in (1, -1))
    pulled = torch.einsum("hr,ors->ohs", query_mean, turns)
    popularity = torch.einsum("o,ohr,hrs,ohs->h", weight, pulled, of_key, pulled)
    content = torch.stack((symmetric, skew, popularity)).clamp(min=0)
    where = torch.einsum("ors,hs->hor", turns, key_mean)
    query_only = _position(where, of_query, torch.zeros_like(query_mean), None, seen)
    outer = query_mean.unsqueeze(-1) * query_mean.unsqueeze(-2)
    position = _position(where, outer, query_mean, None if bias is None else bias / scale, seen)
    variances = torch.cat((content, torch.stack((query_only, position))))
    total = variances.sum(0)
    parts = variances / torch.where(total > 0, total, 1.0)
    pairwise = parts[0] + parts[1]
    symmetry = (parts[0] - parts[1]) / torch.where(pairwise > 0, pairwise, 1.0)
    return {"symmetry": symmetry, **dict(zip(PARTS, parts, strict=True)), "interaction": torch.zeros_like(symmetry)}


def _position(
    where: Float[Tensor, "heads offsets r"],
    second: Float[Tensor, "heads r r"],
    query_mean: Float[Tensor, "heads r"],
    bias: Float[Tensor, "heads offsets"] | None,
    seen: Float[Tensor, "length offsets"],
) -> Float[Tensor, " heads"]:
    """Variance over visible offsets of q·R(Δ)k̄ + bias(Δ), with each query's mean subtracted, over all queries q."""
    heads, count, rank = where.shape
    # One more coordinate holds the bias: q·v + b = [q; 1]·[v; b].
    extra = where.new_zeros(heads, count, 1) if bias is None else bias.unsqueeze(-1)
    vectors = torch.cat((where, extra), dim=-1)
    moment = where.new_zeros(heads, rank + 1, rank + 1)
    moment[:, :rank, :rank] = second
    moment[:, :rank, rank] = moment[:, rank, :rank] = query_mean
    moment[:, rank, rank] = 0 if bias is None else 1
    number = seen.sum(1, keepdim=True)
    mean = torch.einsum("no,hor->hnr", seen / number, vectors)
    square = torch.einsum("hor,hrs,hos->ho", vectors, moment, vectors)
    square_of_mean = torch.einsum("hnr,hrs,hns->hn", mean, moment, mean)
    spread = seen @ square.mT - number * square_of_mean.mT
    variance = spread.sum(0) / seen.sum()
    # Where nothing depends on the offset, only rounding is left.
    return torch.where(variance > 1e-12 * square.amax(-1).clamp(min=0), variance, 0.0)


def part_ranks(covariance: Float[Tensor, "heads n n"]) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """Effective ranks, on data and at offset 0, of the symmetric and of the skew part of every head."""
    form = Form.from_gram(covariance)
    alike, points = form.symmetric_eigenvalues().abs(), form.skew_values()
    return entropy_rank(alike, alike.sum(-1) == 0), entropy_rank(points, points.sum(-1) == 0)
