"""Changes of attention heads whose cost is estimated or measured: each gives the new output of heads in one call.

The same function serves the estimate and the measurement. A change sees a head's call as `HeadCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.quantisation import Quantiser
from keyquery.intervene.dial.means import SiteMeans
from keyquery.intervene.dial.parts import parts_of
from keyquery.intervene.sites import Context, Rewrite, Site
from keyquery.listening.call import Call, weights_of

Cell = tuple[int, int]  # a site and a head


class HeadCall:
    """Some heads of one attention call, a contiguous range, as changes see them; in float32 at least."""

    def __init__(self, call: Call, site: Site, heads: range, means: SiteMeans | None = None) -> None:
        self.call, self.site, self.heads, self.means = call, site, heads, means
        self._span = slice(heads.start, heads.stop)
        self._wide = torch.promote_types(call.query.dtype, torch.float32)

    @cached_property
    def context(self) -> Context:
        """Queries and keys of all heads as rewrites of them see them."""
        return self.site.context(self.call)

    @cached_property
    def products(self) -> Float[Tensor, "batch heads n m"]:
        """The scaled products of queries and keys, before soft caps, biases and masks."""
        query, key = (x[:, self._span].to(self._wide) for x in (self.context.queries, self.context.keys))
        return query[..., -self.context.new :, :] @ key.mT * self.site.scale

    @cached_property
    def parts(self) -> Float[Tensor, "5 batch heads n m"]:
        """The five parts of `products`."""
        return parts_of(self.context, self.means, self._span, self._wide) * self.site.scale

    @cached_property
    def visible(self) -> Bool[Tensor, "#batch #heads n m"]:
        """Which keys each query sees."""
        shape = (1, 1, self.call.query.shape[-2], self.call.key.shape[-2])
        mask = self.call.mask
        return torch.ones(shape, dtype=torch.bool, device=self.call.query.device) if mask is None else self.some(mask)

    @cached_property
    def values(self) -> Float[Tensor, "batch heads m v"]:
        """The values of the heads."""
        return self.call.values(self._span).to(self._wide)

    @cached_property
    def weights(self) -> Float[Tensor, "batch heads n m"]:
        """The attention weights without a change."""
        return self.softmax(self.call.scores(self._span))

    @cached_property
    def output(self) -> Float[Tensor, "batch heads n v"]:
        """The output without a change."""
        return self.weights @ self.values

    def some(self, x: Tensor) -> Tensor:
        """The heads of a tensor (batch, heads or 1, …)."""
        return x if x.shape[1] == 1 else x[:, self._span]

    def softmax(self, scores: Float[Tensor, "batch heads n m"]) -> Float[Tensor, "batch heads n m"]:
        """The attention weights of scores, with the sinks of the call."""
        return weights_of(scores, None if self.call.sinks is None else self.call.sinks[self._span])

    def attend(
        self, products: Float[Tensor, "batch heads n m"], bias_gain: float = 1.0
    ) -> Float[Tensor, "batch heads n v"]:
        """The output with other products of queries and keys, and a gain on the bias of positions."""
        call = self.call
        bias = None if call.bias is None else self.some(call.bias).to(products)
        if call.given_scores is not None:
            scores = call.scores(self._span) + (products - self.products)
            scores = scores if bias is None or bias_gain == 1 else scores + (bias_gain - 1) * bias
        else:
            scores = products if call.softcap is None else call.softcap * torch.tanh(products / call.softcap)
            scores = scores if bias is None or bias_gain == 0 else scores + bias_gain * bias
            scores = scores.masked_fill(~self.visible, -torch.inf)
        return self.softmax(scores) @ self.values


@dataclass(frozen=True)
class Change:
    """A change of heads; called, it gives the new output of the heads of a call."""

    needs_means: ClassVar[bool] = False  # the means of data that separate the parts
    per_key_head: ClassVar[bool] = False  # changes keys or values: all heads that share a key head change together

    name: str

    def __call__(self, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
        """The output of the heads with the change."""
        raise NotImplementedError

    def facts(self, head: Cell) -> Mapping[str, Any]:
        """Further facts of a head's row."""
        return {}


@dataclass(frozen=True)
class Kept(Change):
    """Only some parts of the scores are kept; the bias of positions belongs to the position part."""

    needs_means: ClassVar[bool] = True

    parts: frozenset[str]

    def __call__(self, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
        """The output with the products of these parts alone."""
        kept = torch.tensor([part in self.parts for part in PARTS])
        if 2 * int(kept.sum()) > len(PARTS):
            products = heads.products - heads.parts[~kept].sum(0)
        else:
            products = heads.parts[kept].sum(0)
        return heads.attend(products, float("position" in self.parts))


@dataclass(frozen=True)
class Off(Change):
    """The output of a head is replaced by zero, or by its mean over data."""

    means: Mapping[int, Float[Tensor, "heads v"]] | None = None  # by site

    def __call__(self, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
        """Zeros, or the mean at every token."""
        if self.means is None:
            return torch.zeros_like(heads.output)
        mean = self.means[heads.site.index][heads.heads.start : heads.heads.stop]
        return mean.to(heads.output)[None, :, None].expand_as(heads.output)


@dataclass(frozen=True)
class Uniform(Change):
    """Attention is uniform over the visible keys."""

    def __call__(self, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
        """The mean of the visible values."""
        seen = heads.visible.to(heads.values)
        weights = seen / seen.sum(-1, keepdim=True).clamp(min=1)
        return weights.expand(*heads.values.shape[:2], -1, -1) @ heads.values


@dataclass(frozen=True)
class Window(Change):
    """Only keys at most `width` − 1 tokens away are visible, and the first token, if `first`."""

    width: int
    first: bool

    def __call__(self, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
        """The output with the weights of the window alone, normalised anew."""
        call = heads.call
        query, key = call.positions[:, None, :, None], call.key_positions[:, None, None, :]
        near = (query - key).abs() < self.width
        near = near | (key == 0) if self.first else near
        near = near.to(heads.values.device) & heads.visible
        scores = call.scores(slice(heads.heads.start, heads.heads.stop)).masked_fill(~near, -torch.inf)
        return heads.softmax(scores) @ heads.values


@dataclass(frozen=True)
class Rewritten(Change):
    """Queries and keys of each head are replaced by a rewrite: without a direction, or of another form."""

    rewrites: Mapping[Cell, Rewrite]  # by site and head
    described: Mapping[Cell, Mapping[str, Any]] = field(default_factory=dict)  # facts of heads

    def __call__(self, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
        """The output with the products of the new queries and keys."""
        products = heads.products.clone()
        for number, head in enumerate(heads.heads):
            query, key = self.rewrites[heads.site.index, head](heads.context)
            products[:, number] = ((query.to(products) @ key.to(products).mT) * heads.site.scale)[:, 0]
        return heads.attend(products)

    def facts(self, head: Cell) -> Mapping[str, Any]:
        """The number, value and share of a direction."""
        return self.described.get(head, {})


@dataclass(frozen=True)
class Quantised(Change):
    """Keys or values are rounded to a few bits, as a compressed cache of keys and values holds them."""

    per_key_head: ClassVar[bool] = True

    values: bool
    quantiser: Quantiser
    means: Mapping[int, SiteMeans] | None = None  # by site; stored apart: q·(k − k̄) is rounded, q·k̄ is not

    def __call__(self, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
        """The output with rounded keys or values."""
        real, span = heads.call.real, slice(heads.heads.start, heads.heads.stop)
        if self.values:
            return heads.weights @ self.quantiser(heads.values, real)
        keys = heads.context.keys[:, span].to(heads.values)
        if self.means is None:
            rounded = self.quantiser(keys, real)
        else:
            mean = self.means[heads.site.index].at(heads.context)[1][:, span].to(keys)
            rounded = self.quantiser(keys - mean, real) + mean
        queries = heads.context.queries[:, span, -heads.context.new :].to(keys)
        return heads.attend(queries @ rounded.mT * heads.site.scale)


@dataclass(frozen=True)
class Called(Change):
    """A change of the user's: a function of the call that returns the new output of all its heads."""

    function: Callable[[Call], Tensor]

    def __call__(self, heads: HeadCall) -> Float[Tensor, "batch heads n v"]:
        """The heads of what the function returns."""
        out: Any = self.function(heads.call)
        shape = (len(heads.call.query), heads.call.heads, *heads.output.shape[-2:])
        if not isinstance(out, Tensor) or tuple(out.shape) != shape:
            actual = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"change {self.name!r} must return the output of all heads {shape}, got {actual}")
        return heads.some(out).to(heads.output)
