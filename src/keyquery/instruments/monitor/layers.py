"""The attention layers of a model that is trained: their weights, and gradients of these, as they are now."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.has_form import FormedHeads, MixedHeads, formed
from keyquery.checkpoints.sources import Loaded
from keyquery.listening.parts.pairs import module_name

ENTRIES = 2**26  # of tensors that are stacked: a training run leaves little memory
Pair = tuple[Tensor, Tensor]  # of queries and keys: (groups, shared or 1, r, d) each


class Layers:
    """The attention layers of a model by module, read anew for every record; of latent attention the first kernel."""

    def __init__(self, heads: Heads, model: nn.Module) -> None:
        self.heads, self.model, modules = heads, model, dict(model.named_modules())
        self._formed = formed(model)
        self.counts: dict[str, int] = {}  # of heads
        self._indices: dict[str, int] = {}
        for index in range(len(heads)):
            layer = self._read(index)
            self._indices.setdefault(name := module_name(layer, modules), index)
            self.counts.setdefault(name, layer.heads)

    def now(self, modules: Collection[str]) -> dict[str, Layer]:
        """Layers with their current weights, by module, of those that are known, and whose weights are finite."""
        layers = {}
        for name in modules:
            try:
                if name in self._indices:
                    layers[name] = self._read(self._indices[name])
            except ValueError:  # NaN: the logits of its heads say so
                if all(whole(weight).isfinite().all() for weight in self.model.get_submodule(name).parameters()):
                    raise
        return layers

    def _read(self, index: int) -> Layer:
        if not isinstance(self.heads, FormedHeads):
            return self.heads[index]
        with gathered(self.model.get_submodule(self._formed[index])):
            return self.heads[index]

    @torch.no_grad()
    def gradient_norms(self, modules: Collection[str]) -> dict[str, Pair]:
        """‖∂L/∂W_q‖ and ‖∂L/∂W_k‖ of every head, by module; heads that share keys have the norm of the shared ones."""
        if all(weight.grad is None for weight in self.model.parameters()):
            return {}
        pairs = {name: self._gradients(name) for name in modules if name in self._indices}
        queries, keys = (together(_norms, {name: (pair[side],) for name, pair in pairs.items()}) for side in (0, 1))
        both = {name: torch.broadcast_tensors(queries[name], keys[name]) for name in pairs}
        return {name: (query.flatten(), key.flatten()) for name, (query, key) in both.items()}

    def _gradients(self, name: str) -> Pair:
        if name in self._formed:
            return _of_projections(self.model.get_submodule(name))
        heads, index = self.heads, self._indices[name]
        heads, index = heads._order[index] if isinstance(heads, MixedHeads) else (heads, index)
        of_gradients = copy.copy(heads)
        of_gradients.source = cast(Any, Gradients(heads.source, self.model))
        weights = of_gradients[index].weights
        return weights.query, weights.key


def together(function: Callable[..., Tensor], tensors: Mapping[Any, tuple[Tensor, ...]]) -> dict[Any, Tensor]:
    """A function of the tensors of every layer, (layers, …) at once for layers alike: each call launches kernels."""
    groups: dict[Any, list[Any]] = {}
    for name, parts in tensors.items():
        groups.setdefault(tuple((part.shape, part.dtype, part.device) for part in parts), []).append(name)
    results: dict[Any, Tensor] = {}
    for names in groups.values():
        size = max(ENTRIES // max(sum(part.numel() for part in tensors[names[0]]), 1), 1)
        for some in (names[first : first + size] for first in range(0, len(names), size)):
            stacked = [torch.stack(side) for side in zip(*(tensors[name] for name in some), strict=True)]
            results |= zip(some, function(*stacked), strict=True)
    return results


def _norms(gradients: Tensor) -> Tensor:
    wide = torch.promote_types(gradients.dtype, torch.float32)
    return torch.linalg.vector_norm(gradients, dim=(-2, -1), dtype=wide)


def _of_projections(module: Any) -> Pair:
    """Of `kq.Attention`, whose structured kernels have no query weights of their own: those of the shared ones."""

    def gradient(projection: Any) -> Tensor:
        if projection is None or projection.weight.grad is None:
            return torch.zeros(module.heads, 1, 1, 1)
        return whole(projection.weight.grad).unflatten(0, (-1, module.head_dim)).unsqueeze(1)  # (key heads, 1, r, d)

    key = gradient(getattr(module, "key", None))
    if getattr(module, "query", None) is None:
        shared = key.expand(-1, module.heads // len(key), -1, -1)
        return shared, shared
    return gradient(module.query).unflatten(0, (len(key), -1)).squeeze(2), key


class Gradients(Loaded):
    """A source of weights that gives their gradients instead; zero where a weight has none."""

    def __init__(self, source: Any, model: nn.Module) -> None:
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        zeros = {name: torch.zeros(()).expand(shape) for name, shape in source.shapes.items() if name not in gradients}
        super().__init__(zeros | gradients, source.label, source.config)
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def whole(tensor: Any) -> Tensor:
    """A tensor gathered from the processes that share it (FSDP2); any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """While it is entered, parameters that processes share (FSDP2) are whole; all processes must enter it."""
    sharded = [
        (owner, name, weight)
        for owner in module.modules()
        for name, weight in owner._parameters.items()
        if weight is not None and hasattr(weight, "full_tensor")
    ]
    try:
        for owner, name, weight in sharded:
            owner._parameters[name] = cast(Any, whole(weight.detach()))
        yield
    finally:
        for owner, name, weight in sharded:
            owner._parameters[name] = weight
