"""`Call`: one attention call of a running model, with what enters its scores and what follows from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import contains
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from keyquery.layers.fused import as_wide

EVERY = slice(None)
ROUNDING = 1e-5  # of scores: what differs by less is no bias
REPLACEABLE = ("query", "key", "value", "bias", "scores", "output")
TENSORS = ("query", "key", "value", "attn_mask", "position_bias", "sinks", "given_scores", "given_output")
HIDDEN = -9000.0  # added to the score of a hidden key, at most: models use −10,000, −1e9, the smallest number or −∞


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a call: positions of queries and keys, and which are real (None: all).

    `shift` is what the model added to all positions of a row, by padding before its first token; None: nothing.
    """

    positions: Shaped[Tensor, "#batch n"]
    key_positions: Shaped[Tensor, "#batch m"]
    real_queries: Bool[Tensor, "batch n"] | None = None
    real: Bool[Tensor, "batch m"] | None = None
    shift: Int[Tensor, "batch 1"] | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a running model, as `kq.listen` gives it.

    Queries and keys are as they enter the scores: after positions and norms. Where queries are grouped (GQA, MQA),
    there are fewer key heads than heads.

    Parameters
    ----------
    module, name, layer
        The attention module, its name in the model, and its number, in the order of first calls.
    query, key, value
        (batch, heads, n, r), (batch, key heads, m, r) and (batch, key heads, m, v). `value` is None, and so is what
        depends on it, where a model changes its attention weights after the softmax.
    scale, softcap, sinks
        The factor of the scores; c, where they become c·tanh(s/c); and learned sinks (heads,), if any.
    attn_mask, causal
        The mask as it was passed, boolean (True: visible) or additive; and the offset up to which a query sees later
        keys: query i sees keys up to i + causal. None: not causal beyond the mask.
    position_bias
        What the module adds to its scores beside the mask.
    is_cross
        Whether queries and keys are of different sequences.
    tokens
        Positions, and which tokens are padding.
    cache
        The cache of keys and values that the module was called with.
    given_scores, given_output
        Scores that the model computed itself, and that were seen as they entered its softmax; and an output that
        another listener put in.
    """

    module: nn.Module
    name: str
    layer: int
    query: Float[Tensor, "batch heads n r"]
    key: Float[Tensor, "batch key_heads m r"]
    value: Float[Tensor, "batch value_heads m v"] | None
    scale: float | None
    tokens: Tokens
    attn_mask: Tensor | None = None
    causal: int | None = None
    position_bias: Tensor | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " heads"] | None = None
    is_cross: bool = False
    cache: Any = None
    given_scores: Float[Tensor, "batch heads n m"] | None = None
    given_output: Float[Tensor, "batch heads n v"] | None = None

    def __repr__(self) -> str:
        kind = "cross-attention" if self.is_cross else "attention"
        shared = f", {self.key_heads} key heads" if self.key_heads != self.heads else ""
        n, m = self.query.shape[-2], self.key.shape[-2]
        return f"Call({self.layer}, {self.name or 'the model'}: {kind}, {self.heads} heads{shared}, {n} × {m} tokens)"

    @property
    def heads(self) -> int:
        """Number of (query) heads."""
        return self.query.shape[1]

    @property
    def key_heads(self) -> int:
        """Number of key heads, fewer than `heads` under GQA."""
        return self.key.shape[1]

    @property
    def positions(self) -> Shaped[Tensor, "#batch n"]:
        """Position of every query; 0 for the first token of a sequence, wherever padding or packing puts it."""
        return self.tokens.positions

    @property
    def key_positions(self) -> Shaped[Tensor, "#batch m"]:
        """Position of every key."""
        return self.tokens.key_positions

    @property
    def real(self) -> Bool[Tensor, "batch m"] | None:
        """Which keys are not padding; None: all."""
        return self.tokens.real

    @property
    def real_queries(self) -> Bool[Tensor, "batch n"] | None:
        """Which queries are not padding; None: all."""
        return self.tokens.real_queries

    @cached_property
    def mask(self) -> Bool[Tensor, "#batch #heads n m"] | None:
        """Which keys each query sees; None if it sees all."""
        n, m = self.query.shape[-2], self.key.shape[-2]
        seen = None
        if self.attn_mask is not None:
            seen = four_dims(visible(self.attn_mask))
        elif self.given_scores is not None:
            seen = visible(self.given_scores)
        if self.causal is not None:
            past = torch.ones(n, m, dtype=torch.bool, device=self.query.device).tril(self.causal)
            seen = past[None, None] if seen is None else seen & past
        return None if seen is None else seen.expand(-1, -1, n, m)

    @cached_property
    def bias(self) -> Float[Tensor, "#batch #heads n m"] | None:
        """What is added to the scaled scores of visible keys: ALiBi, relative positions; None if nothing is."""
        if self.given_scores is not None and self.scale is not None:
            added = self.given_scores - self.scale * (self.query @ self.keys().mT)
            added = added.where(visible(self.given_scores), 0.0)
            largest = self.given_scores.where(visible(self.given_scores), 0.0).abs().amax()
            return added if bool(added.abs().amax() > ROUNDING * largest) else None
        bias = self.position_bias
        if self.attn_mask is not None and self.attn_mask.dtype != torch.bool:
            finite = self.attn_mask.where(visible(self.attn_mask), 0.0)
            if bool(finite.any()):
                bias = finite if bias is None else bias + finite
        return bias

    @cached_property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        if self.is_cross:
            return False
        if self.causal is not None:
            return True
        n, m = self.query.shape[-2], self.key.shape[-2]
        # by position and by slot: positions start again in packed rows, and slots of a cache may be free
        later = self.key_positions[:, None, None] > self.positions[:, None, :, None]
        later = later & torch.ones(n, m, dtype=torch.bool, device=later.device).triu(m - n + 1)
        return not bool((later if self.mask is None else self.mask & later).any())

    def keys(self, heads: slice = EVERY) -> Float[Tensor, "batch some m r"]:
        """The keys of query heads: shared ones are repeated."""
        return _for_heads(self.key, self.heads, heads)

    def values(self, heads: slice = EVERY) -> Float[Tensor, "batch some m v"]:
        """The values of query heads: shared ones are repeated."""
        if self.value is None:
            raise ValueError(f"{self.name or 'the model'} changes its attention after the softmax: no value is known")
        return _for_heads(self.value, self.heads, heads)

    def scores(self, heads: slice = EVERY) -> Float[Tensor, "batch some n m"]:
        """The scores that enter the softmax, of all heads or a slice of them; −inf where a key is not visible."""
        if self.given_scores is not None:
            given = self.given_scores[:, heads]
            return given.masked_fill(~visible(given), -torch.inf)
        if self.scale is None:
            raise ValueError(f"{self.name}: the scores of this call are not known")
        wide = torch.promote_types(self.query.dtype, torch.float32)
        scores = self.query[:, heads].to(wide) @ self.keys(heads).to(wide).mT * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + _some(self.bias, heads)
        return scores if self.mask is None else scores.masked_fill(~_some(self.mask, heads), -torch.inf)

    def weights(self, heads: slice = EVERY) -> Float[Tensor, "batch some n m"]:
        """Attention weights; 0 for a query that sees no key. With learned sinks they sum to less than 1."""
        return weights_of(self.scores(heads), None if self.sinks is None else self.sinks[heads])

    def output(self, heads: slice = EVERY) -> Float[Tensor, "batch some n v"]:
        """The output of heads, before the output projection."""
        if self.given_output is not None:
            return self.given_output[:, heads]
        weights = self.weights(heads)
        return weights @ self.values(heads).to(weights)

    def replaced(self, new: Mapping[str, Tensor]) -> Call:
        """The call with other queries, keys, values or scores."""
        fields: dict[str, Any] = {name: tensor for name, tensor in new.items() if name in ("query", "key", "value")}
        if "bias" in new:
            fields |= {"attn_mask": self.mask, "causal": None, "position_bias": new["bias"]}
        if "output" in new:
            fields["given_output"] = new["output"]
        if "scores" in new:
            fields["given_scores"] = new["scores"]
        elif self.given_scores is not None and {"query", "key", "bias"} & set(new):
            fields["given_scores"] = self._rescored(new)
        return replace(self, **fields)

    def _rescored(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Scores that the model computed itself, with their product of queries and keys, and their bias, replaced."""
        if self.scale is None or self.given_scores is None:
            raise ValueError(f"{self.name or 'the model'} does not scale q·k by a number: replace its scores instead")
        before = self.query @ self.keys().mT
        after = fields.get("query", self.query) @ _for_heads(fields.get("key", self.key), self.heads, EVERY).mT
        change = self.scale * (after - before)
        if "bias" in fields:
            change = change + (fields["bias"] if self.bias is None else fields["bias"] - self.bias)
        return self.given_scores + change.to(self.given_scores)

    def part(self, sequences: slice = EVERY, queries: slice = EVERY, heads: slice = EVERY, keys: slice = EVERY) -> Call:
        """The call of some sequences of its batch, of some heads, and some of their queries and keys."""
        fields: dict[str, Any] = {"sinks": None if self.sinks is None else self.sinks[heads]}
        for name in set(TENSORS) - {"sinks"}:
            tensor = four_dims(getattr(self, name))
            if name in ("key", "value"):
                shared = tensor is None or heads == EVERY
                tensor = tensor if shared else _for_heads(tensor, self.heads, heads)
                fields[name] = _cut(tensor, sequences, EVERY, keys)
            else:
                columns = EVERY if name in ("query", "given_output") else keys
                fields[name] = _cut(tensor, sequences, heads, queries, columns)
        sides = {"positions": queries, "real_queries": queries, "key_positions": keys, "real": keys}
        tokens = {name: _cut(x, sequences, sides.get(name, EVERY)) for name, x in vars(self.tokens).items()}
        first = queries.indices(self.query.shape[-2])[0]
        causal = None if self.causal is None else self.causal + first
        return replace(self, tokens=Tokens(**tokens), causal=causal, **fields)

    def detached(self) -> Call:
        """The call without gradients."""
        fields: dict[str, Any] = {name: x.detach() for name in TENSORS if (x := getattr(self, name)) is not None}
        return replace(self, **fields)

    def attend(self, new: Mapping[str, Tensor], dropout: float = 0.0) -> Float[Tensor, "batch heads n v"]:
        """The output of all heads with replaced tensors; fused where scores are the product of queries and keys."""
        if "output" in new:
            return new["output"].to(self.query.dtype if self.value is None else self.value.dtype)
        call = self.replaced(new)
        value = call.values()
        if call.given_scores is not None or self.softcap is not None or self.sinks is not None:
            return nn.functional.dropout(call.weights(), dropout).to(value.dtype) @ value
        width, narrow = call.query.shape[-1], value.shape[-1]
        mask, is_causal = call._fused_mask()
        out = scaled_dot_product_attention(
            call.query,
            call.keys(),
            as_wide(value, width) if width > narrow else value,
            mask,
            dropout,
            is_causal=is_causal,
            scale=call.scale,
        )
        return out[..., :narrow]

    def _fused_mask(self) -> tuple[Tensor | None, bool]:
        """The mask and bias as torch's fused attention takes them; kernels are fastest without."""
        if self.position_bias is None and self.attn_mask is None:
            square = self.causal == 0 and self.query.shape[-2] == self.key.shape[-2]
            return (None, True) if square else (self.mask, False)
        if self.position_bias is None and self.causal is None and self.attn_mask is not None:
            boolean = self.attn_mask.dtype == torch.bool
            return self.attn_mask if boolean else self.attn_mask.to(self.query.dtype), False
        if self.bias is None:
            return self.mask, False
        mask = self.bias if self.mask is None else torch.where(self.mask, self.bias, -torch.inf)
        return mask.to(self.query.dtype), False

    def check(self, new: Any) -> Mapping[str, Tensor]:
        """What `on_call` returned, if it fits; raises in one sentence."""
        if not isinstance(new, Mapping) or not set(new) <= set(REPLACEABLE):
            got = " and ".join(map(str, new)) if isinstance(new, Mapping) else f"a {type(new).__name__}"
            raise TypeError(f"on_call must return None or a dict with any of {', '.join(REPLACEABLE)}, got {got:.60}")
        batch, heads, n = self.query.shape[:3]
        width = (getattr(new.get("query", new.get("key")), "shape", ()) or self.query.shape)[-1]
        shapes: dict[str, tuple[Any, ...]] = {
            "query": (batch, heads, n, width),
            "key": (batch, (heads, self.key_heads), self.key.shape[-2], width),
            "bias": ((batch, 1), (heads, 1), n, self.key.shape[-2]),
            "scores": (batch, heads, n, self.key.shape[-2]),
        }
        if self.value is not None:
            shapes["value"] = (batch, (heads, self.key_heads), *self.value.shape[-2:])
            shapes["output"] = (batch, heads, n, self.value.shape[-1])
        for name, tensor in new.items():
            if name not in shapes:
                raise ValueError(
                    f"{self.name or 'the model'} changes its attention after the softmax: {name} cannot be replaced"
                )
            sizes = [size if isinstance(size, tuple) else (size,) for size in shapes[name]]
            actual, what = tuple(getattr(tensor, "shape", ())), f"replaced {name} of {self.name or 'the model'} must be"
            fits = len(actual) == len(sizes) and all(map(contains, sizes, actual))
            if not isinstance(tensor, Tensor) or not fits:
                expected = ", ".join(str(allowed[0]) for allowed in sizes)
                raise ValueError(f"{what} a tensor ({expected}), got {actual or type(tensor).__name__}")
        widths = [new.get(name, getattr(self, name)).shape[-1] for name in ("query", "key")]
        if widths[0] != widths[1]:
            raise ValueError(f"replaced queries and keys must have one width, got {widths[0]} and {widths[1]}")
        return new


def visible(mask: Tensor) -> Bool[Tensor, "*mask"]:
    """Where a boolean or additive mask, or masked scores, show a key."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def weights_of(
    scores: Float[Tensor, "batch heads n m"], sinks: Float[Tensor, " heads"] | None = None
) -> Float[Tensor, "batch heads n m"]:
    """The softmax of scores, with 0 where a query sees no key; sinks take part in it and are dropped."""
    if sinks is not None:
        column = sinks.to(scores)[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    return scores.softmax(-1).where(seen, 0.0)


def _for_heads(x: Tensor, heads: int, chosen: slice) -> Tensor:
    """Keys or values of query heads; shared ones are repeated."""
    if x.shape[1] == heads:
        return x[:, chosen]
    return x[:, torch.arange(heads, device=x.device)[chosen] // (heads // x.shape[1])]


def _some(x: Tensor, heads: slice) -> Tensor:
    return x if x.shape[1] == 1 else x[:, heads]


def four_dims(x: Any) -> Any:
    """A tensor that is broadcast over (batch, heads, n, m) with these dimensions; None as it is."""
    return x if x is None or x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))


def _cut(x: Any, *parts: slice) -> Any:
    """A part of a tensor along its first dimensions, but where it is broadcast; None as it is."""
    if x is None:
        return None
    return x[tuple(EVERY if size == 1 else part for size, part in zip(x.shape, parts, strict=False))]
