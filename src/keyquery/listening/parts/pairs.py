"""Queries, keys and the query-key pairs that a running model scores, per layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from keyquery.checkpoints import Layer
from keyquery.checkpoints.sources import bare
from keyquery.listening.attachment import add_listener
from keyquery.listening.call import Call
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import Batch, entry, on_forward, on_input, watch

SPARSE = 4  # positions beyond so many lengths are too sparse for means by position


@dataclass(frozen=True, eq=False)
class ScoredPairs:
    """One call of a self-attention layer: (scaled) queries and keys before RoPE, and which pairs are scored."""

    query: Float[Tensor, "batch heads n r"]
    key: Float[Tensor, "batch heads n r"]
    positions: Int[Tensor, "#batch n"]
    visible: Bool[Tensor, "#batch any n n"]
    real: Bool[Tensor, "batch n"]


@dataclass(frozen=True, eq=False)
class CrossPairs:
    """One call of a cross-attention layer: (scaled) queries and keys before RoPE, and which of them are no padding."""

    query: Float[Tensor, "batch heads n r"]
    key: Float[Tensor, "batch heads m r"]
    real_query: Bool[Tensor, "batch n"]
    real_key: Bool[Tensor, "batch m"]


OnPairs = Callable[[Layer, ScoredPairs], None]
OnCrossPairs = Callable[[Layer, CrossPairs], None]


@contextmanager
def watch_pairs(
    model: nn.Module, heads: Iterable[Layer], on_pairs: OnPairs, on_cross: OnCrossPairs | None = None
) -> Iterator[Callable[[Batch], Any]]:
    """Context whose function runs a batch; `on_pairs` gets every call of every self-attention layer.

    Queries and keys are computed from what enters a layer; which pairs are visible, where tokens stand and which are
    padding is what its call says.
    """
    model = bare(model)
    layers = [layer for layer in heads if layer.on_data or (layer.kind == "cross" and on_cross is not None)]
    watcher = _Watcher(layers, dict(model.named_modules()), on_pairs, on_cross)

    with temporarily(model, partial(watcher.attach, model)), watch(model, {}) as run:
        yield run


class _Watcher:
    """Pairs what entered the projections of layers with the call that follows."""

    def __init__(
        self, layers: list[Layer], modules: dict[str, nn.Module], on_pairs: OnPairs, on_cross: OnCrossPairs | None
    ) -> None:
        self._layers, self._modules = layers, modules
        self._on_pairs, self._on_cross = on_pairs, on_cross
        self._names = {layer.index: module_name(layer, modules) for layer in layers}
        self._inputs: dict[int, dict[str, Tensor]] = {}  # by layer and side, until its call
        self._by_call: dict[str, list[Layer]] = {}

    def attach(self, model: nn.Module, changes: ExitStack) -> None:
        """Hooks on the projections, and a listener to calls."""
        for layer in self._layers:
            names = {side: entry(layer, side) for side in ("query", "key")}
            for side in ("query",) if layer.kind == "self" or names["query"] == names["key"] else names:
                on_input(self._modules[names[side]], partial(self._enter, layer, side), changes)
        add_listener(model, self._call, changes)
        on_forward(model, changes, self._end)

    def _enter(self, layer: Layer, side: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = self._inputs.setdefault(layer.index, {})
        if layer.kind == "cross" and isinstance(module, nn.MultiheadAttention):
            given = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs).arguments
            inputs |= {name: _rows(module, given[name], layer) for name in ("query", "key")}
            return
        tensor = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        inputs[side] = _rows(module, tensor, layer)

    def _call(self, call: Call) -> None:
        if call.name not in self._by_call:
            self._by_call[call.name] = self._of_module(call.name)
        for layer in self._by_call[call.name]:
            inputs = self._inputs.pop(layer.index, None)
            if inputs is not None:
                self._emit(layer, inputs, call)

    def _of_module(self, name: str) -> list[Layer]:
        """The layers of a module: of its name, or else one that holds it or is held by it."""
        exact = [layer for layer in self._layers if self._names[layer.index] == name]
        around = [
            layer
            for layer in self._layers
            if f"{self._names[layer.index]}.".startswith(f"{name}.")
            or f"{name}.".startswith(f"{self._names[layer.index]}.")
        ]
        return exact or around

    def _end(self) -> None:
        """Layers whose call torch does not show: which pairs they score is known from their facts alone."""
        for layer in self._layers:
            inputs = self._inputs.pop(layer.index, None)
            if inputs is not None:
                self._emit(layer, inputs, None)

    def _emit(self, layer: Layer, inputs: Mapping[str, Tensor], call: Call | None) -> None:
        if layer.kind == "self":
            self._on_pairs(layer, scored_pairs(layer, inputs["query"], call))
        elif "key" in inputs and self._on_cross is not None:
            self._on_cross(layer, _cross_pairs(layer, inputs["query"], inputs["key"], call))


def module_name(layer: Layer, modules: Mapping[str, nn.Module]) -> str:
    """The attention module of a layer; the nope and rope parts of MLA share one."""
    name = layer.name.removesuffix(" (nope)").removesuffix(" (rope)")
    return "" if name == "attention" and name not in modules else name


def _rows(module: nn.Module, tensor: Tensor, layer: Layer) -> Float[Tensor, "batch n d"]:
    """What entered a module, with the batch first."""
    if getattr(module, "batch_first", True) is False and tensor.ndim == 3:
        tensor = tensor.transpose(0, 1)
    if tensor.ndim == 4 and not layer.by_offset:  # rows and columns of one sequence
        tensor = tensor.flatten(1, 2)
    return tensor.detach().reshape(-1, *tensor.shape[-2:]).float()


def scored_pairs(layer: Layer, tokens: Float[Tensor, "batch n d"], call: Call | None) -> ScoredPairs:
    """Queries and keys of tokens that entered a layer, with what its call says of the pairs; None: not seen."""
    batch, n = tokens.shape[:2]
    query, key = _projected(layer, tokens, tokens)
    fits = call is not None and call.query.shape[-2] == call.key.shape[-2] == n and len(call.query) == batch
    visible = _from_call(call) if fits else None  # type: ignore[arg-type]
    visible = _from_facts(layer, n, tokens.device) if visible is None else visible
    real = call.real if fits else None  # type: ignore[union-attr]
    if real is None:
        real = torch.ones(batch, n, dtype=torch.bool, device=tokens.device)
    else:
        visible = visible & real[:, None, None, :] & real[:, None, :, None]
    positions = torch.arange(n, device=tokens.device)[None]
    if fits and not call.positions.is_floating_point() and int(call.positions.max()) < SPARSE * n:  # type: ignore[union-attr]
        positions = call.positions  # type: ignore[union-attr]
    return ScoredPairs(query, key, positions, visible, real)


def _projected(layer: Layer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled queries of tokens x and keys of tokens y, with one key per query head."""
    query, key = layer.project(x, y)
    query = (query * layer.scale).flatten(1, 2)
    return query, key.expand(*key.shape[:2], layer.heads // key.shape[1], *key.shape[3:]).flatten(1, 2)


def _from_call(call: Call) -> Bool[Tensor, "#batch any n n"]:
    n, mask = call.query.shape[-2], call.mask
    if mask is None:
        return torch.ones(1, 1, n, n, dtype=torch.bool, device=call.query.device)
    mask = mask.expand(-1, -1, n, n)
    alike = mask.shape[1] == 1 or bool((mask == mask[:, :1]).all())
    return mask[:, :1] if alike else mask


def _from_facts(layer: Layer, n: int, device: torch.device) -> Bool[Tensor, "1 1 n n"]:
    """Visible pairs of a layer that is causal, or has a window."""
    pairs = torch.ones(1, 1, n, n, dtype=torch.bool, device=device)
    offsets = torch.arange(n, device=device) - torch.arange(n, device=device)[:, None]  # key minus query
    if layer.causal:
        pairs = pairs & (offsets <= 0)
    return pairs if layer.window is None else pairs & (offsets.abs() < layer.window)


def _cross_pairs(layer: Layer, x: Tensor, y: Tensor, call: Call | None) -> CrossPairs:
    query, key = _projected(layer, x, y)
    ones = (torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) for t in (x, y))
    masks = (None, None) if call is None else (call.real_queries, call.real)
    return CrossPairs(
        query,
        key,
        *(
            every if mask is None or mask.shape != every.shape else mask
            for every, mask in zip(ones, masks, strict=True)
        ),
    )
