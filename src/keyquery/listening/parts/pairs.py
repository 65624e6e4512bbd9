"""Queries, keys and the query-key pairs that a running model scores, per layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.sources import bare
from keyquery.listening.call import Call
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import Batch, entry, module_of, on_input, on_output, running
from keyquery.listening.listen import add_listener
from keyquery.listening.parts.means import Moments
from keyquery.listening.tokens import nested

SPARSE = 4  # positions beyond so many lengths are too sparse for means by position


@dataclass(frozen=True, eq=False)
class ScoredPairs:
    """One call of an attention layer: (scaled) queries and keys before RoPE, and which pairs are scored.

    In self-attention queries and keys are of the same tokens.
    """

    query: Float[Tensor, "batch heads n r"]
    key: Float[Tensor, "batch heads m r"]
    positions: Int[Tensor, "#batch n"]
    key_positions: Int[Tensor, "#batch m"]
    visible: Bool[Tensor, "#batch any n m"]
    real: Bool[Tensor, "batch n"]
    real_key: Bool[Tensor, "batch m"]


OnPairs = Callable[[Layer, ScoredPairs], None]


@contextmanager
def watch_pairs(
    model: nn.Module, heads: Iterable[Layer], on_pairs: OnPairs, cross: bool = False
) -> Iterator[Callable[[Batch], Any]]:
    """Context whose function runs a batch; `on_pairs` gets every call of every self-attention layer; `cross`: of all.

    Queries and keys are computed from what enters a layer; which pairs are visible, where tokens stand and which are
    padding is what its call says.
    """
    model = bare(model)
    layers = [layer for layer in heads if layer.on_data or (layer.kind == "cross" and cross)]
    watcher = _Watcher(layers, model, on_pairs)
    with temporarily(model, partial(watcher.attach, model)), running(model) as run:
        yield run


def queries_and_keys(model: nn.Module, batch: Batch, heads: Heads) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries and keys (heads, tokens, r) before RoPE, unscaled, of all self-attention layers by index; no padding."""
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    layers = [layer for layer in heads if layer.on_data]
    _project(model, [batch], layers, lambda layer, query, key: parts.setdefault(layer.index, []).append((query, key)))
    sides = {index: zip(*pairs, strict=True) for index, pairs in sorted(parts.items())}
    return {index: (torch.cat(queries, 1), torch.cat(keys, 1)) for index, (queries, keys) in sides.items()}


def joint_moments(model: nn.Module, batches: Iterable[Batch], heads: Heads) -> dict[int, Moments]:
    """Moments of [q; k] of every head, (heads, 2r), by the index of each self-attention layer, over all tokens.

    Statistics of scores depend on these only, such as QΣKᵀ, without the d×d covariance Σ.
    """
    layers = [layer for layer in heads if layer.on_data and layer.by_offset]
    moments = {layer.index: Moments() for layer in layers}

    def add(layer: Layer, query: Tensor, key: Tensor) -> None:
        moments[layer.index].update(torch.cat((query, key), -1))

    _project(model, batches, layers, add)
    return moments


def _project(
    model: nn.Module, batches: Iterable[Batch], layers: list[Layer], add: Callable[[Layer, Tensor, Tensor], None]
) -> None:
    """Run batches; `add` gets queries and keys (heads, tokens, r) of self-attention, unscaled and without padding."""
    called = set()

    def note(layer: Layer, pairs: ScoredPairs) -> None:
        called.add(layer.index)
        query, key = (x.transpose(0, 1)[:, pairs.real] for x in (pairs.query / layer.scale, pairs.key))
        add(layer, query, key)

    with watch_pairs(model, layers, note) as run:
        for batch in batches:
            run(batch)
    require_called(layers, called)


def real_tokens(tokens: Float[Tensor, "batch n d"], mask: Tensor | None) -> Bool[Tensor, "batch n"]:
    """Which tokens are no padding, by the mask of a call if that is of these tokens."""
    if mask is not None and mask.shape == tokens.shape[:2]:
        return mask
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def require_called(layers: Iterable[Any], called: Container[int]) -> None:
    """Raise if a layer was not called."""
    silent = next((layer.name for layer in layers if layer.index not in called), None)
    if silent is not None:
        raise ValueError(f"{silent} was never called: these inputs give no activations there")


class _Watcher:
    """Pairs what entered the projections of layers with the call that follows."""

    def __init__(self, layers: Sequence[Layer], model: nn.Module, on_pairs: OnPairs) -> None:
        self._layers, self._modules, self._on_pairs = layers, dict(model.named_modules()), on_pairs
        self._inputs: dict[int, dict[str, Tensor]] = {}  # by layer and side, until its call
        self._by_call: dict[str, list[Layer]] = {}
        self._thread = get_ident()

    def attach(self, model: nn.Module, changes: ExitStack) -> None:
        """Hooks on the projections, and a listener to calls."""
        for layer in self._layers:
            names = {side: entry(layer, side) for side in ("query", "key")}
            for side in ("query",) if layer.kind == "self" or names["query"] == names["key"] else names:
                on_input(self._modules[names[side]], partial(self._enter, layer, side), changes)
        add_listener(model, self._call, changes)
        on_output(model, lambda *_: self._show(self._layers, None), changes)  # calls that torch does not show

    def _enter(self, layer: Layer, side: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread:  # a forward that had begun before; it is refused at its next call
            return
        inputs = self._inputs.setdefault(layer.index, {})
        if layer.kind == "cross" and isinstance(module, nn.MultiheadAttention):
            given = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs).arguments
            inputs |= {name: _rows(module, given[name], layer) for name in ("query", "key")}
            return
        tensor = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        inputs[side] = _rows(module, tensor, layer)

    def _call(self, call: Call) -> None:
        if call.name not in self._by_call:
            names = [(layer, module_name(layer, self._modules)) for layer in self._layers]
            exact = [layer for layer, name in names if name == call.name]
            self._by_call[call.name] = exact or [layer for layer, name in names if nested(name, call.name)]
        self._show(self._by_call[call.name], call)

    def _show(self, layers: Sequence[Layer], call: Call | None) -> None:
        """Show layers whose inputs came since; without a call, their facts alone say what they score."""
        for layer in layers:
            inputs = self._inputs.pop(layer.index, {})
            if "query" in inputs and (layer.kind == "self" or "key" in inputs):
                self._on_pairs(layer, scored_pairs(layer, inputs["query"], call, inputs.get("key")))


def module_name(layer: Layer, modules: Mapping[str, nn.Module]) -> str:
    """The attention module of a layer, which may be the model itself."""
    name = module_of(layer)
    return "" if name == "attention" and name not in modules else name


def _rows(module: nn.Module, tensor: Tensor, layer: Layer) -> Float[Tensor, "batch n d"]:
    """What entered a module, with the batch first."""
    if getattr(module, "batch_first", True) is False and tensor.ndim == 3:
        tensor = tensor.transpose(0, 1)
    if tensor.ndim == 4 and not layer.by_offset:  # rows and columns of one sequence
        tensor = tensor.flatten(1, 2)
    return tensor.detach().reshape(-1, *tensor.shape[-2:]).float()


def scored_pairs(
    layer: Layer,
    tokens: Float[Tensor, "batch n d"],
    call: Call | None,
    others: Float[Tensor, "batch m d"] | None = None,
) -> ScoredPairs:
    """Queries and keys of tokens that entered a layer, with what its call says of the pairs; None: not seen.

    In cross-attention, keys are of `others`.
    """
    query, key = layer.project(tokens, tokens if others is None else others)
    query = (query * layer.scale).flatten(1, 2)
    key = key.expand(*key.shape[:2], layer.heads // key.shape[1], *key.shape[3:]).flatten(1, 2)
    batch, n = tokens.shape[:2]
    positions = torch.arange(n, device=tokens.device)[None]
    if others is not None:
        real = real_tokens(tokens, None if call is None else call.real_queries)
        real_key = real_tokens(others, None if call is None else call.real)
        key_positions = torch.arange(others.shape[1], device=tokens.device)[None]
        visible = real[:, None, :, None] & real_key[:, None, None]
        return ScoredPairs(query, key, positions, key_positions, visible, real, real_key)
    if call is not None and not (call.query.shape[-2] == call.key.shape[-2] == n and len(call.query) == batch):
        call = None
    visible = _visible(layer, n, call).to(tokens.device)
    real = real_tokens(tokens, None if call is None else call.real)
    if call is not None and call.real is not None:
        visible = visible & real[:, None, None, :] & real[:, None, :, None]
    if call is not None and not call.positions.is_floating_point() and int(call.positions.max()) < SPARSE * n:
        positions = call.positions
    if layer.context is not None and (last := int(positions.max())) >= layer.context:
        raise ValueError(
            f"{layer.name} scores positions from {layer.context:,} on in another way, which is not read, and the data "
            f"reach position {last:,}: use windows of at most {layer.context:,} tokens (length, --length)"
        )
    return ScoredPairs(query, key, positions, positions, visible, real, real)


def _visible(layer: Layer, n: int, call: Call | None) -> Bool[Tensor, "#batch any n n"]:
    """Visible pairs of a call, or of a layer that is causal, or has a window."""
    if call is not None and call.mask is not None:
        alike = call.mask.shape[1] == 1 or bool((call.mask == call.mask[:, :1]).all())
        return call.mask[:, :1] if alike else call.mask
    pairs = torch.ones(1, 1, n, n, dtype=torch.bool)
    if call is None and layer.causal:
        pairs = pairs.tril()
    if call is None and layer.window is not None:
        pairs = pairs.tril(layer.window - 1).triu(1 - layer.window)
    return pairs
