"""The attention modules of a live model, and rewrites of their queries and keys on the way to the scores.

A rewrite maps the queries and keys of some heads, rotated as in the scores, to new ones, possibly wider: the score is
their inner product at any width, so that fused attention stays fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.forms import Rope
from keyquery.listening.call import Call
from keyquery.listening.hooks import Batch
from keyquery.listening.live import live_heads
from keyquery.listening.parts.pairs import module_name


@dataclass(frozen=True, eq=False)
class Turn:
    """The rotation of a module's queries and keys: RoPE from dimension `start` on, or none."""

    rope: Rope | None = None
    start: int = 0

    def rotate(self, x: Float[Tensor, "*#batch n r"], by: Shaped[Tensor, "*#batch n"]) -> Float[Tensor, "*out n r"]:
        """R(by)·x."""
        if self.rope is None:
            return x
        turned = self.rope.rotate(x[..., self.start :], by)
        return torch.cat((x[..., : self.start].expand(*turned.shape[:-1], -1), turned), -1) if self.start else turned

    def back(self, x: Float[Tensor, "*#batch n r"], by: Shaped[Tensor, "*#batch n"]) -> Float[Tensor, "*out n r"]:
        """R(by)⁻¹·x."""
        if self.rope is None:
            return x
        turned = slice(self.start, self.start + self.rope.dims)
        size = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        size[turned] = self.rope.factor**-2  # once per direction
        return self.rotate(x * size, -by)


@dataclass
class Past:
    """Cached tokens of a module: also their queries, which KV caches do not keep, and the initial means."""

    queries: Tensor
    keys: Tensor
    positions: Tensor
    means: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Context:
    """What a call attends over: queries and keys of all m tokens, of which the last `new` ask.

    Queries and keys are as in the scores: rotated, and one key per query head.
    """

    queries: Float[Tensor, "batch heads m r"]
    keys: Float[Tensor, "batch heads m r"]
    new: int
    positions: Shaped[Tensor, "#batch m"]
    turned: Shaped[Tensor, "#batch m"]  # by how many positions tokens are rotated
    real: Bool[Tensor, "batch m"] | None  # non-padding; None: all
    turn: Turn
    constants: bool  # whether a constant per query matters, as with sinks and soft caps
    past: Past

    def means(self) -> tuple[Float[Tensor, "heads r"], Float[Tensor, "heads r"]]:
        """Mean query and key before RoPE over non-padding tokens; with a cache, over its first call."""
        if self.past.means is None:
            self.past.means = self._mean(self.queries), self._mean(self.keys)
        return self.past.means

    def _mean(self, x: Float[Tensor, "batch heads m r"]) -> Float[Tensor, "heads r"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        count = x.shape[0] * x.shape[2] if self.real is None else self.real.sum()
        x = x if self.real is None else x * self.real[:, None, :, None]
        if len(self.turned) == 1:  # shared positions: rotate back the sum instead of each sequence
            x = x.sum(0, keepdim=True, dtype=wide)
        return self.turn.back(x, self.turned.unsqueeze(1)).sum((0, 2), dtype=wide) / count


class Rewrite:
    """New queries and keys for some heads of a module."""

    heads: list[int]

    def __call__(self, context: Context) -> tuple[Tensor, Tensor]:
        """Queries (batch, its heads, n, w) and keys (batch, its heads, m, w)."""
        raise NotImplementedError

    def bias_gain(self) -> Float[Tensor, " heads"] | None:
        """Gain on an additive position bias, such as ALiBi; None: it stays."""
        return None


class Site:
    """An attention module and the rewrites of its heads."""

    def __init__(self, model: nn.Module, heads: Heads, layer: Layer, module: nn.Module, turn: Turn) -> None:
        self._model, self._weights = ref(model), [id(weight) for weight in module.parameters()]
        self.found = heads
        self.index = layer.index
        self.name = layer.name
        self.count = layer.heads
        self.position = layer.position
        self.scale = layer.scale
        self.module = module
        self.turn = turn
        self.rewrites: list[Rewrite] = []
        self.calls = 0
        self.sorted = False  # whether the module permutes interleaved pairs into halves before RoPE
        self.longest = layer.context  # positions that its scores are read for
        self._pasts: WeakKeyDictionary[Any, Past] = WeakKeyDictionary()

    @property
    def key_heads(self) -> int:
        """Number of heads of its keys, fewer than its heads where queries are grouped."""
        return int(self.read().weights.query.shape[0])

    @property
    def placed(self) -> bool:
        """Whether positions enter its scores by RoPE, or by a bias that the dial can scale."""
        return self.turn.rope is not None or self.position in ("alibi", "scaled alibi", "t5")

    def read(self) -> Layer:
        """The layer with its current weights, also if they were replaced."""
        now = [id(weight) for weight in self.module.parameters()]
        model = self._model()
        if now != self._weights and model is not None:
            self.found, self._weights = live_heads(model), now
        layer: Layer = self.found[self.index]
        return layer

    def context(self, call: Call) -> Context:
        """What rewrites of a call's queries and keys start from; their product times `scale` is the score."""
        if call.scale is None:
            raise ValueError(f"{self.name} does not scale q·k by a number: its scores cannot be changed")
        new, m = call.query.shape[-2], call.key.shape[-2]
        if self.longest is not None and m > self.longest:
            raise ValueError(
                f"{self.name} scores more than {self.longest} tokens in another way, got {m}: not supported"
            )
        factor, key = call.scale / self.scale, call.keys()  # some modules scale their queries themselves
        queries, positions, past = call.query if factor == 1 else call.query * factor, call.key_positions, None
        if old := m - new:
            past = None if call.cache is None else self._pasts.get(call.cache)
            known = past is not None and past.keys.shape[-2] >= old
            if past is None or not (known and torch.equal(past.keys[..., -old:, :], key[..., :old, :])):
                raise ValueError(
                    f"{self.name}: the cache has keys whose queries are unknown; it must be filled under this change, "
                    "without beam search, static caches or cropping; otherwise use use_cache=False"
                )
            queries = torch.cat((past.queries[..., -old:, :], queries), -2)
            positions = torch.cat((past.positions[:, -old:].expand(len(call.positions), -1), call.positions), -1)
        past = Past(queries, key, positions, None if past is None else past.means)
        if call.cache is not None:
            self._pasts[call.cache] = past
        constants = call.softcap is not None or call.sinks is not None
        turned = positions if call.tokens.shift is None else positions + call.tokens.shift
        return Context(queries, key, new, positions, turned, call.real, self.turn, constants, past)

    def rewritten(self, call: Call) -> dict[str, Tensor]:
        """What replaces the queries, keys and bias of a call; nothing where they stay the same."""
        self.calls += 1
        context = self.context(call)
        factor, key = (call.scale or self.scale) / self.scale, context.keys
        query = context.queries[..., -context.new :, :]
        parts = [(rewrite.heads, *rewrite(context)) for rewrite in self.rewrites]
        new: dict[str, Tensor] = {}
        if not all(self._same(query, heads, wide) and self._same(key, heads, its) for heads, wide, its in parts):
            query, key = self._joined(query, key, parts)
            new = {"query": query if factor == 1 else query / factor, "key": key}
        gains = self._bias_gains()
        if gains is not None and call.bias is not None:
            new["bias"] = call.bias * gains.to(call.bias)[:, None, None]
        return new

    def _same(self, before: Tensor, heads: list[int], after: Tensor) -> bool:
        """Whether the vectors of some heads are unchanged: the same memory, or equal values."""
        if before.shape[-1] != after.shape[-1] or torch.compiler.is_compiling():
            return False
        before = before if len(heads) == self.count else before[:, heads]
        same = before.data_ptr() == after.data_ptr() and before.stride() == after.stride()
        return same or torch.equal(before, after)

    def _joined(
        self, query: Tensor, key: Tensor, parts: list[tuple[list[int], Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys of all heads at one width, with the rewritten ones inserted."""
        if len(parts) == 1 and len(parts[0][0]) == self.count:
            return parts[0][1], parts[0][2]
        width = max(query.shape[-1], *(wide.shape[-1] for _, wide, _ in parts))
        width = -(-width // 8) * 8  # alignment for fused kernels
        query, key = (nn.functional.pad(t, (0, width - t.shape[-1])) for t in (query, key))
        for heads, wide_query, wide_key in parts:
            blank = width - wide_query.shape[-1]
            query[:, heads], key[:, heads] = (nn.functional.pad(t, (0, blank)) for t in (wide_query, wide_key))
        return query, key

    def _bias_gains(self) -> Float[Tensor, " heads"] | None:
        """Gain on each head's position bias; None if all stay."""
        gains = torch.ones(self.count, dtype=torch.float64)
        for rewrite in self.rewrites:
            if (gain := rewrite.bias_gain()) is not None:
                gains[rewrite.heads] = gain
        return gains if bool((gains != 1).any()) else None


def labels_of(sites: Mapping[int, Site]) -> list[str]:
    """Labels of all layers of a model."""
    return next(iter(sites.values())).found.labels()


def find_sites(model: nn.Module, batch: Batch | None = None) -> dict[int, Site]:
    """The self-attention modules of a live model, by the index of their layer; a class of its own needs a batch."""
    heads, modules = live_heads(model, batch), dict(model.named_modules())
    sites: dict[int, Site] = {}
    unrotated = 0
    for layer in heads:
        if layer.kind != "self" or layer.axial is not None or layer.early_rope is not None:
            continue  # nor can rotations on a grid, or before a norm, be undone
        if layer.name.endswith(" (nope)"):  # MLA: nope and rope dimensions are concatenated in one query and key
            unrotated = layer.weights.query.shape[2]
            continue
        rope, is_latent = layer.rope, layer.name.endswith(" (rope)")
        is_sorted = is_latent and rope is not None and rope.interleaved
        if rope is not None and is_sorted:  # MLA permutes interleaved pairs into halves before RoPE
            rope = replace(rope, interleaved=False)
        module = modules.get(module_name(layer, modules))
        if module is None:
            raise ValueError(f"{type(model).__name__} has no attention module {layer.name}")
        if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
            raise ValueError(f"{layer.name} has extra keys (add_zero_attn or add_bias_kv): it cannot be changed")
        sites[layer.index] = Site(model, heads, layer, module, Turn(rope, unrotated if is_latent else 0))
        sites[layer.index].sorted = is_sorted
    if not sites:
        raise ValueError(f"{type(model).__name__} has no self-attention that can be changed")
    return sites
