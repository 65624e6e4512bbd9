"""The attention modules of a live model, and rewrites of their queries and keys on the way to the scores.

A rewrite maps the queries and keys of some heads, rotated as in the scores, to new ones, possibly wider: the score is
their inner product at any width, so that fused attention still works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from keyquery.capture.hooks import mask_for
from keyquery.checkpoints import Heads, Layer, read
from keyquery.forms import Rope


@dataclass(frozen=True, eq=False)
class Turn:
    """The rotation of a module's queries and keys: RoPE from dimension `start` on, or none."""

    rope: Rope | None = None
    start: int = 0

    def rotate(self, x: Float[Tensor, "*#batch n r"], places: Shaped[Tensor, "*#batch n"]) -> Float[Tensor, "*out n r"]:
        """R(place)·x."""
        if self.rope is None:
            return x
        turned = self.rope.rotate(x[..., self.start :], places)
        return torch.cat((x[..., : self.start].expand(*turned.shape[:-1], -1), turned), -1) if self.start else turned

    def back(self, x: Float[Tensor, "*#batch n r"], places: Shaped[Tensor, "*#batch n"]) -> Float[Tensor, "*out n r"]:
        """R(place)⁻¹·x."""
        if self.rope is None:
            return x
        turned = slice(self.start, self.start + self.rope.dims)
        size = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        size[turned] = self.rope.factor**-2  # once per direction
        return self.rotate(x * size, -places)


@dataclass
class Past:
    """Cached tokens of a module: also their queries, which KV caches do not keep, and the initial means."""

    queries: Tensor
    keys: Tensor
    places: Tensor
    means: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an attention module: new queries of the last n of the m tokens that have keys.

    Queries and keys are as in the scores: rotated, and one key per query head.
    """

    queries: Float[Tensor, "batch heads m r"]  # of all m tokens
    keys: Float[Tensor, "batch heads m r"]
    new: int
    places: Shaped[Tensor, "#batch m"]
    real: Bool[Tensor, "batch m"] | None  # non-padding; None: all
    turn: Turn
    constants: bool  # whether a constant per query matters, as with sinks and soft caps
    past: Past

    def at(self, mean: Float[Tensor, "heads r"]) -> Float[Tensor, "#batch heads m r"]:
        """A mean query or key, rotated to the position of every token."""
        m = self.keys.shape[-2]
        return self.turn.rotate(mean.to(self.keys)[None, :, None].expand(-1, -1, m, -1), self.places.unsqueeze(1))

    def means(self) -> tuple[Float[Tensor, "heads r"], Float[Tensor, "heads r"]]:
        """Mean query and key before RoPE over non-padding tokens; with a cache, over its first call."""
        if self.past.means is None:
            self.past.means = self._mean(self.queries), self._mean(self.keys)
        return self.past.means

    def _mean(self, x: Float[Tensor, "batch heads m r"]) -> Float[Tensor, "heads r"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        count = x.shape[0] * x.shape[2] if self.real is None else self.real.sum()
        x = x if self.real is None else x * self.real[:, None, :, None]
        if len(self.places) == 1:  # shared positions: rotate back the sum instead of each sequence
            x = x.sum(0, keepdim=True, dtype=wide)
        return self.turn.back(x, self.places.unsqueeze(1)).sum((0, 2), dtype=wide) / count


@runtime_checkable
class Rewrite(Protocol):
    """New queries and keys for some heads of a module."""

    heads: list[int]

    def __call__(self, call: Call) -> tuple[Tensor, Tensor]:
        """Queries (batch, its heads, n, w) and keys (batch, its heads, m, w)."""
        ...

    def bias_gain(self) -> Float[Tensor, " heads"]:
        """Gain on an additive position bias, such as ALiBi."""
        ...


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
        self.heard: Callable[[Tensor, Tensor], None] | None = None  # callback for the queries and keys in use
        self.proven: set[Any] = set()  # attention functions verified to accept wider queries and keys
        self._now = threading.local()
        self.sorted = False  # whether the module permutes interleaved pairs into halves before RoPE
        self.longest: int | None = None  # sequence length up to which its RoPE frequencies are known
        self._pasts: WeakKeyDictionary[Any, Past] = WeakKeyDictionary()

    @property
    def cache(self) -> Any:
        """The cache of the current call, per thread."""
        return getattr(self._now, "cache", None)

    @cache.setter
    def cache(self, cache: Any) -> None:
        """Set for this thread."""
        self._now.cache = cache

    @property
    def placed(self) -> bool:
        """Whether positions enter its scores by RoPE, or by a bias that the dial can scale."""
        return self.turn.rope is not None or self.position in ("alibi", "scaled alibi", "t5")

    def read(self) -> Layer:
        """The layer with its current weights, also if they were replaced."""
        now = [id(weight) for weight in self.module.parameters()]
        model = self._model()
        if now != self._weights and model is not None:
            self.found, self._weights = read(model), now
        layer: Layer = self.found[self.index]
        return layer

    def widen(
        self,
        query: Float[Tensor, "batch heads n r"],
        key: Float[Tensor, "batch heads m r"],
        places: Shaped[Tensor, "#batch n"] | None,
        real: Bool[Tensor, "batch m"] | None,
        constants: bool = False,
    ) -> tuple[Float[Tensor, "batch heads n w"], Float[Tensor, "batch heads m w"]]:
        """Queries and keys of all heads with rewrites applied; the same tensors if nothing changes.

        The caller can then use the module's original path.
        """
        self.calls += 1
        if self.longest is not None and key.shape[-2] > self.longest:
            raise ValueError(
                f"{self.name} changes its RoPE frequencies beyond {self.longest} tokens, got {key.shape[-2]}: "
                "not supported"
            )
        call = self._call(query, key, places, real, constants)
        parts = [(rewrite.heads, *rewrite(call)) for rewrite in self.rewrites]
        if not all(self._same(query, heads, new) and self._same(key, heads, its) for heads, new, its in parts):
            query, key = self._joined(query, key, parts)
        if self.heard is not None:
            self.heard(query, key)
        return query, key

    def _same(self, own: Tensor, heads: list[int], new: Tensor) -> bool:
        """Whether the vectors of some heads are unchanged: the same memory, or equal values."""
        if own.shape[-1] != new.shape[-1] or torch.compiler.is_compiling():
            return False
        own = own if len(heads) == self.count else own[:, heads]
        return (own.data_ptr() == new.data_ptr() and own.stride() == new.stride()) or torch.equal(own, new)

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

    def bias_gains(self) -> Float[Tensor, " heads"]:
        """Gain on each head's position bias."""
        gains = torch.ones(self.count, dtype=torch.float64)
        for rewrite in self.rewrites:
            gains[rewrite.heads] = rewrite.bias_gain()
        return gains

    def known(self) -> Past | None:
        """The recorded tokens of the current cache."""
        return None if self.cache is None else self._pasts.get(self.cache)

    def _call(self, query: Tensor, key: Tensor, places: Tensor | None, real: Tensor | None, constants: bool) -> Call:
        new, old = query.shape[-2], key.shape[-2] - query.shape[-2]
        past = self.known() if old else None
        if places is None:
            places = _one_by_one(old, old + new, query.device)
        queries = query
        if old:
            known = past is not None and past.keys.shape[-2] >= old
            if past is None or not (known and torch.equal(past.keys[..., -old:, :], key[..., :old, :])):
                raise ValueError(
                    f"{self.name}: the cache has keys whose queries are unknown; it must be filled under this change, "
                    "without beam search, static caches or cropping; otherwise use use_cache=False"
                )
            queries = torch.cat((past.queries[..., -old:, :], query), -2)
            places = torch.cat((past.places[:, -old:].expand(len(places), -1), places), -1)
        means = None if past is None else past.means
        past = Past(queries, key, places, means)
        if self.cache is not None:
            self._pasts[self.cache] = past
        return Call(queries, key, new, places, real, self.turn, constants, past)


@lru_cache(maxsize=8)
def _one_by_one(start: int, end: int, device: torch.device) -> Shaped[Tensor, "1 n"]:
    """Consecutive positions; cached, so that means rotated to them can be reused."""
    return torch.arange(start, end, device=device)[None]


def labels_of(sites: Mapping[int, Site]) -> list[str]:
    """Labels of all layers of a model."""
    return next(iter(sites.values())).found.labels()


def repeated(x: Float[Tensor, "batch kv m r"], heads: int) -> Float[Tensor, "batch heads m r"]:
    """One key or value per query head (expands GQA)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def find_sites(model: nn.Module) -> dict[int, Site]:
    """The self-attention modules of a live model, by the index of their layer."""
    heads, modules = read(model), dict(model.named_modules())
    sites: dict[int, Site] = {}
    unrotated = 0
    for layer in heads:
        if layer.kind != "self" or layer.axial is not None or layer.early_rope is not None:
            continue  # nor can rotations on a grid, or before a norm, be undone
        if layer.name.endswith(" (nope)"):  # MLA: nope and rope dimensions are concatenated in one query and key
            unrotated = layer.weights.query.shape[2]
            continue
        name = layer.name
        turn = Turn(layer.rope)
        sorted_ = False
        if name.endswith(" (rope)"):
            sorted_ = layer.rope is not None and layer.rope.interleaved
            name, turn = name.removesuffix(" (rope)"), Turn(_halved(layer.rope), unrotated)
        module = modules.get("" if name == "attention" and name not in modules else name)
        if module is None:
            raise ValueError(f"{type(model).__name__} has no attention module {name}")
        if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
            raise ValueError(f"{name} has extra keys (add_zero_attn or add_bias_kv): it cannot be changed")
        sites[layer.index] = Site(model, heads, layer, module, turn)
        sites[layer.index].sorted, sites[layer.index].longest = sorted_, _longest(heads.config, layer)
    if not sites:
        raise ValueError(f"{type(model).__name__} has no self-attention that can be changed")
    return sites


def _longest(config: Mapping[str, Any], layer: Layer) -> int | None:
    """Sequence length up to which RoPE frequencies are fixed; some models change them for longer texts."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if layer.rope is None or scaling.get("rope_type", scaling.get("type")) not in ("dynamic", "longrope", "su"):
        return None
    original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    longest = original or config.get("max_position_embeddings")
    return int(longest) if longest else None


def _halved(rope: Rope | None) -> Rope | None:
    """MLA permutes interleaved pairs into halves before RoPE."""
    return rope and Rope(rope.dims, rope.base, False, rope.frequencies, rope.factor)


class Run(threading.local):
    """Masks and positions of a running model, per thread."""

    def __init__(self, paired: bool = False) -> None:
        self.masks: list[dict[str, Tensor]] = []  # of every running model, innermost last
        self.positions: Tensor | None = None
        self._paired = paired

    def real(self, batch: int, tokens: int, module: str) -> Bool[Tensor, "batch m"] | None:
        """Non-padding tokens of a module; None without a mask."""
        for masks in reversed(self.masks):
            if (mask := mask_for(masks, (batch, tokens), module, self._paired)) is not None:
                return mask
        return None

    def places(self, tokens: int) -> Shaped[Tensor, "#batch n"] | None:
        """Positions of the new tokens, if the model passed any."""
        at = self.positions
        return at if at is not None and at.ndim == 2 and at.shape[-1] == tokens else None
