"""Changes of attention heads whose cost is estimated or measured: each gives the new output of heads in one call.

The same function serves the estimate and the measurement. A change sees a head's call as `HeadCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.forms.parts import PARTS
from keyquery.intervene.dial.means import SiteMeans, parts_of
from keyquery.intervene.head_output import without_output
from keyquery.intervene.sites import Context, Rewrite, Site
from keyquery.listening.call import Call, weights_of

Cell = tuple[int, int]  # a site and a head
BITS = (2, 3, 4, 8)
SMALLEST = 1e-8  # step of quantisation, of vectors that are constant


class HeadCall:
    """Some heads of one attention call, a contiguous range, as changes see them; in float32 at least."""

    def __init__(self, call: Call, site: Site, heads: range, means: SiteMeans | None = None) -> None:
        self.call, self.site, self.heads, self.means = call, site, heads, means
        self.span = slice(heads.start, heads.stop)
        self._wide = torch.promote_types(call.query.dtype, torch.float32)

    @cached_property
    def context(self) -> Context:
        """Queries and keys of all heads as rewrites of them see them."""
        return self.site.context(self.call)

    @cached_property
    def products(self) -> Float[Tensor, "batch heads n m"]:
        """The scaled products of queries and keys, before soft caps, biases and masks."""
        query, key = (x[:, self.span].to(self._wide) for x in (self.context.queries, self.context.keys))
        return query[..., -self.context.new :, :] @ key.mT * self.site.scale

    @cached_property
    def parts(self) -> Float[Tensor, "5 batch heads n m"]:
        """The five parts of `products`."""
        return parts_of(self.context, self.means, self.span, self._wide) * self.site.scale

    @cached_property
    def visible(self) -> Bool[Tensor, "#batch #heads n m"]:
        """Which keys each query sees."""
        shape = (1, 1, self.call.query.shape[-2], self.call.key.shape[-2])
        mask = self.call.mask
        return torch.ones(shape, dtype=torch.bool, device=self.call.query.device) if mask is None else self.some(mask)

    @cached_property
    def values(self) -> Float[Tensor, "batch heads m v"]:
        """The values of the heads."""
        return self.call.values(self.span).to(self._wide)

    @cached_property
    def weights(self) -> Float[Tensor, "batch heads n m"]:
        """The attention weights without a change."""
        return self.softmax(self.call.scores(self.span))

    @cached_property
    def output(self) -> Float[Tensor, "batch heads n v"]:
        """The output without a change."""
        return self.weights @ self.values

    def some(self, x: Tensor) -> Tensor:
        """The heads of a tensor (batch, heads or 1, …)."""
        return x if x.shape[1] == 1 else x[:, self.span]

    def softmax(self, scores: Float[Tensor, "batch heads n m"]) -> Float[Tensor, "batch heads n m"]:
        """The attention weights of scores, with the sinks of the call."""
        return weights_of(scores, None if self.call.sinks is None else self.call.sinks[self.span])

    def attend(
        self, products: Float[Tensor, "batch heads n m"], bias_gain: float = 1.0
    ) -> Float[Tensor, "batch heads n v"]:
        """The output with other products of queries and keys, and a gain on the bias of positions."""
        call = self.call
        bias = None if call.bias is None else self.some(call.bias).to(products)
        if call.given_scores is not None:
            scores = call.scores(self.span) + (products - self.products)
            scores = scores if bias is None or bias_gain == 1 else scores + (bias_gain - 1) * bias
        else:
            scores = products if call.softcap is None else call.softcap * torch.tanh(products / call.softcap)
            scores = scores if bias is None or bias_gain == 0 else scores + bias_gain * bias
            scores = scores.masked_fill(~self.visible, -torch.inf)
        return self.softmax(scores) @ self.values


@dataclass(frozen=True)
class Change:
    """A change of heads: its name, and the function that gives the new output of the heads of a call."""

    name: str
    output: Callable[[HeadCall], Float[Tensor, "batch heads n v"]]
    needs_means: bool = False  # the means of data that separate the parts
    per_key_head: bool = False  # changes keys or values: all heads that share a key head change together
    facts: Mapping[Cell, Mapping[str, Any]] = field(default_factory=dict)  # of rows of heads


@dataclass(frozen=True)
class Trial:
    """A change of some heads (by site), made together in one run, and the names of its row."""

    change: Change
    heads: Mapping[int, list[int]]
    names: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> list[Cell]:
        """Its heads as pairs."""
        return [(index, head) for index, numbers in self.heads.items() for head in numbers]


def kept(parts: Collection[str], heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
    """The output with some parts of the scores alone; the bias of positions belongs to the position part."""
    chosen = torch.tensor([part in parts for part in PARTS])
    if 2 * int(chosen.sum()) > len(PARTS):
        products = heads.products - heads.parts[~chosen].sum(0)
    else:
        products = heads.parts[chosen].sum(0)
    return heads.attend(products, float("position" in parts))


def off(means: Mapping[int, Float[Tensor, "all v"]] | None, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
    """Zeros, or the mean of each head's output over data, by site, at every token."""
    return without_output(heads.output, None if means is None else means[heads.site.index][heads.span])


def uniform(heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
    """The mean of the visible values."""
    seen = heads.visible.to(heads.values)
    weights = seen / seen.sum(-1, keepdim=True).clamp(min=1)
    return weights.expand(*heads.values.shape[:2], -1, -1) @ heads.values


def window(width: int, first: bool, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
    """The output with keys at most `width` − 1 tokens away alone, and the first token, if `first`."""
    call = heads.call
    query, key = call.positions[:, None, :, None], call.key_positions[:, None, None, :]
    near = (query - key).abs() < width
    near = near | (key == 0) if first else near
    near = near.to(heads.values.device) & heads.visible
    return heads.softmax(call.scores(heads.span).masked_fill(~near, -torch.inf)) @ heads.values


def rewritten(rewrites: Mapping[Cell, Rewrite], heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
    """The output with new queries and keys of each head: without a direction, or of another form."""
    products = heads.products.clone()
    for number, head in enumerate(heads.heads):
        query, key = rewrites[heads.site.index, head](heads.context)
        products[:, number] = ((query.to(products) @ key.to(products).mT) * heads.site.scale)[:, 0]
    return heads.attend(products)


def quantised(
    values: bool, quantiser: Quantiser, means: Mapping[int, SiteMeans] | None, heads: HeadCall
) -> Float[Tensor, "batch heads n v"]:
    """The output with rounded values, or keys; of means (by site), which are stored apart, q·k̄ is not rounded."""
    if values:
        return heads.weights @ quantiser(heads.values, heads.call.real)
    keys = heads.context.keys[:, heads.span].to(heads.values)
    mean = keys.new_zeros(()) if means is None else means[heads.site.index].at(heads.context)[1][:, heads.span].to(keys)
    rounded = quantiser(keys - mean, heads.call.real) + mean
    queries = heads.context.queries[:, heads.span, -heads.context.new :].to(keys)
    return heads.attend(queries @ rounded.mT * heads.site.scale)


def called(name: str, function: Callable[[Call], Tensor], heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
    """The heads of what a function of the user's returns: the new output of all heads of a call."""
    out: Any = function(heads.call)
    shape = (len(heads.call.query), heads.call.heads, *heads.output.shape[-2:])
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        actual = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"change {name!r} must return the output of all heads {shape}, got {actual}")
    return heads.some(out).to(heads.output)


@dataclass(frozen=True)
class Quantiser:
    """Asymmetric rounding to `bits`, by token or channel; a Hadamard rotation, undone afterwards, spreads outliers."""

    bits: int
    per_channel: bool = False
    rotated: bool = False

    def __call__(
        self, x: Float[Tensor, "batch heads m r"], real: Bool[Tensor, "batch m"] | None = None
    ) -> Float[Tensor, "batch heads m r"]:
        """The rounded vectors; padding (not `real`) sets no range."""
        turn = hadamard(x.shape[-1]).to(x) if self.rotated else None
        x = x if turn is None else x @ turn
        low = high = x
        if self.per_channel and real is not None:
            padding = ~real[:, None, :, None]
            low, high = x.masked_fill(padding, torch.inf), x.masked_fill(padding, -torch.inf)
        dim = -2 if self.per_channel else -1
        low, high = low.amin(dim, keepdim=True), high.amax(dim, keepdim=True)
        step = (high - low).clamp(min=SMALLEST) / (2**self.bits - 1)
        rounded = ((x - low) / step).round().clamp(0, 2**self.bits - 1) * step + low
        return rounded if turn is None else rounded @ turn.mT


def hadamard(width: int) -> Float[Tensor, "width width"]:
    """An orthogonal matrix of Hadamard blocks, of the largest power of 2 that divides the width."""
    block = torch.ones(1, 1)
    while width % (2 * len(block)) == 0:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.block_diag(*[block / len(block) ** 0.5] * (width // len(block)))
