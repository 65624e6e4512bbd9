"""What a head's scores do on data: compare, point, follow the crowd, and mind where the key stands.

With q = q̄ + q′ and k = k̄ + k′, each rotated as the model does, the score of query i and key j is exactly

    ½(q′ᵢ·k′ⱼ + k′ᵢ·q′ⱼ)  +  ½(q′ᵢ·k′ⱼ − k′ᵢ·q′ⱼ)  +  q̄·k′ⱼ  +  qᵢ·k̄
      reciprocal              directional             popularity   position

Without positions in the score the last term is the same for every key, and softmax does not see it. Shares are of the
variance over independent tokens and over the offsets that a query sees, each query's own mean taken out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.forms.form import Form
from keyquery.forms.measures import entropy_rank
from keyquery.forms.offsets import energies, rotations
from keyquery.forms.rope import Rope


@dataclass(frozen=True)
class Visible:
    """Which offsets a query sees in a text of `length` tokens: all, or only back (causal), perhaps in a window."""

    length: int
    causal: bool
    window: int | None = None

    def offsets(self) -> Int[Tensor, " offsets"]:
        """Every offset that occurs, ascending."""
        reach = min(self.length, self.window or self.length) - 1
        return torch.arange(-reach, 1 if self.causal else reach + 1)

    def seen(self) -> Float[Tensor, "length offsets"]:
        """Which offsets each query sees, 0 or 1."""
        at = torch.arange(self.length)[:, None] + self.offsets()
        return ((at >= 0) & (at < self.length)).double()


def shares(
    mean: Float[Tensor, "heads n"],
    covariance: Float[Tensor, "heads n n"],
    scale: float,
    visible: Visible,
    rope: Rope | None = None,
    bias: Float[Tensor, "heads offsets"] | None = None,
) -> dict[str, Float[Tensor, " heads"]]:
    """Reciprocal, directional, popularity and position shares of every head, from the moments of [q; k].

    `bias` is what the model adds to the scaled score by offset (ALiBi, T5). Shares sum to 1; position is exactly 0
    where no position enters the score. Beside them `symmetry` of the pairwise part.
    """
    rank = mean.shape[-1] // 2
    query_mean, key_mean = mean[..., :rank], mean[..., rank:]
    of_query, of_key = covariance[..., :rank, :rank], covariance[..., rank:, rank:]
    offsets, seen = visible.offsets(), visible.seen()
    # A query sees m keys, and their mean score is taken out: of a content term, 1 − 1/m of the variance is left.
    weight = ((1 - 1 / seen.sum(1)) @ seen) / seen.sum()
    turns = rotations(rope, offsets, rank)
    at = energies(covariance, rope, offsets.double())
    mixed = (at.there + at.back) / 4
    reciprocal, directional = (torch.einsum("o,oh->h", weight, mixed + s * at.exchange / 2) for s in (1, -1))
    pulled = torch.einsum("hr,ors->ohs", query_mean, turns)
    popularity = torch.einsum("o,ohr,hrs,ohs->h", weight, pulled, of_key, pulled)
    content = torch.stack((reciprocal, directional, popularity)).clamp(min=0)
    second = of_query + query_mean.unsqueeze(-1) * query_mean.unsqueeze(-2)
    where = torch.einsum("ors,hs->hor", turns, key_mean)
    position = _position(where, second, query_mean, None if bias is None else bias / scale, seen)
    variances = torch.cat((content, position.unsqueeze(0)))
    total = variances.sum(0)
    parts = variances / torch.where(total > 0, total, 1.0)
    pairwise = parts[0] + parts[1]
    symmetry = (parts[0] - parts[1]) / torch.where(pairwise > 0, pairwise, 1.0)
    names = ("reciprocal", "directional", "popularity", "position")
    return {"symmetry": symmetry, **dict(zip(names, parts, strict=True))}


def _position(
    where: Float[Tensor, "heads offsets r"],
    second: Float[Tensor, "heads r r"],
    query_mean: Float[Tensor, "heads r"],
    bias: Float[Tensor, "heads offsets"] | None,
    seen: Float[Tensor, "length offsets"],
) -> Float[Tensor, " heads"]:
    """Variance over visible offsets of q·R(Δ)k̄ + bias(Δ), each query's mean taken out, over all queries q."""
    heads, count, rank = where.shape
    # One more coordinate holds the bias: q·v + b = [q; 1]·[v; b].
    extra = torch.zeros(heads, count, 1, dtype=where.dtype) if bias is None else bias.unsqueeze(-1)
    vectors = torch.cat((where, extra), dim=-1)
    moment = torch.zeros(heads, rank + 1, rank + 1, dtype=where.dtype)
    moment[:, :rank, :rank] = second
    moment[:, :rank, rank] = moment[:, rank, :rank] = query_mean
    moment[:, rank, rank] = 1
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
    alike, points = form.eigenvalues().abs(), form.skew_values()
    return entropy_rank(alike, alike.sum(-1) == 0), entropy_rank(points, points.sum(-1) == 0)
