"""The attention layers of a model that is trained: their weights, and gradients of these, as they are now."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.has_form import FormedHeads, MixedHeads, formed
from keyquery.listening.parts.pairs import module_name

ENTRIES = 2**26  # of tensors that are stacked: a training run leaves little memory
Pair = tuple[Tensor, Tensor]  # of queries and keys: (groups, shared or 1, r, d) each


class Layers:
    """The attention layers of a model by module; of latent attention a module has two kernels.

    A layer is read again only if its weights are no views of the module's parameters, which training changes in place.
    """

    def __init__(self, heads: Heads, model: nn.Module) -> None:
        self.heads, self.model, modules = heads, model, dict(model.named_modules())
        own = formed(model) if isinstance(heads, FormedHeads) else [""] * len(heads)
        self.kept: dict[str, list[Layer]] = {}
        for index, name in enumerate(own):
            layer = self._read(index, name)
            self.kept.setdefault(module_name(layer, modules), []).append(layer)

    def now(self, modules: Iterable[str]) -> dict[str, list[Layer]]:
        """Layers with their current weights, by module, of those that are known."""
        return {name: self.read(name) for name in modules if name in self.kept}

    def read(self, name: str) -> list[Layer]:
        """The layers of a module with their current weights."""
        held = self._parameters(name)
        if not all(_storage(weight) in held for layer in self.kept[name] for weight in _weights(layer)):
            self.kept[name] = [self._read(layer.index, name) for layer in self.kept[name]]
        return self.kept[name]

    def _read(self, index: int, name: str) -> Layer:
        module = self.model.get_submodule(name)
        with gathered(module) if isinstance(self.heads, FormedHeads) else nullcontext():
            return self.heads[index]

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, Pair]:
        """‖∂L/∂W_q‖ and ‖∂L/∂W_k‖ of every head, by module; heads that share keys have the norm of the shared ones."""
        if all(weight.grad is None for weight in self.model.parameters()):
            return {}
        pairs = {name: pair for name in self.kept if (pair := self._gradients(name)) is not None}
        queries, keys = (together(_norms, {name: (pair[side],) for name, pair in pairs.items()}) for side in (0, 1))
        both = {name: torch.broadcast_tensors(queries[name], keys[name]) for name in pairs}
        return {name: (query.flatten(), key.flatten()) for name, (query, key) in both.items()}

    def _gradients(self, name: str) -> Pair | None:
        layer, held = self.kept[name][0], self._parameters(name)
        weights = [held.get(_storage(weight)) for weight in (layer.weights.query, layer.weights.key)]
        module: Any = self.model.get_submodule(name)
        if all(weight is not None and _alike(weight) for weight in weights):
            views = (layer.weights.query, layer.weights.key)
            return tuple(map(_part_of_gradient, views, weights))  # type: ignore[return-value, arg-type]
        if isinstance(self.heads, FormedHeads):
            return _of_projections(module)
        if isinstance(self.heads, MixedHeads):
            return None
        shown = copy.copy(self.heads)
        shown.source = cast(Any, Gradients(self.heads.source, self.model))
        read = shown[layer.index].weights
        return read.query, read.key

    def _parameters(self, name: str) -> dict[int, Tensor]:
        """The parameters of a module by the address of their storage, but for those that processes share (FSDP2).

        Nor those that share a storage, as flattened ones do: a view may be of either.
        """
        module = self.model.get_submodule(name)
        weights = [weight for weight in module.parameters() if not hasattr(weight, "placements")]
        count = Counter(map(_storage, weights))
        return {_storage(weight): weight for weight in weights if count[_storage(weight)] == 1}


def together(function: Callable[..., Tensor], tensors: Mapping[Any, tuple[Tensor, ...]]) -> dict[Any, Tensor]:
    """A function of the tensors of every layer, (layers, …) at once for layers alike: each call launches kernels."""
    groups: dict[Any, list[Any]] = {}
    for name, parts in tensors.items():
        groups.setdefault(tuple((part.shape, part.dtype, part.device) for part in parts), []).append(name)
    results: dict[Any, Tensor] = {}
    for names in groups.values():
        many = max(ENTRIES // max(sum(part.numel() for part in tensors[names[0]]), 1), 1)
        for some in (names[first : first + many] for first in range(0, len(names), many)):
            stacked = [torch.stack(side) for side in zip(*(tensors[name] for name in some), strict=True)]
            results |= zip(some, function(*stacked), strict=True)
    return results


def _weights(layer: Layer) -> list[Tensor]:
    norms = [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
    parts = [*vars(layer.weights).values(), *(part for norm in norms for part in (norm.gain, norm.shift))]
    return [part for part in parts if part is not None]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _alike(weight: Tensor) -> bool:
    """Whether a parameter has a gradient of its own layout."""
    return type(weight.grad) is Tensor and weight.grad.stride() == weight.stride()


def _part_of_gradient(view: Tensor, weight: Tensor) -> Tensor:
    """Of a parameter's gradient what a view shows of the parameter."""
    gradient = cast(Tensor, weight.grad)
    offset = gradient.storage_offset() + view.storage_offset() - weight.storage_offset()
    return gradient.as_strided(view.shape, view.stride(), offset)


def _norms(gradients: Tensor) -> Tensor:
    wide = torch.promote_types(gradients.dtype, torch.float32)
    return torch.linalg.vector_norm(gradients, dim=(-2, -1), dtype=wide)


def _of_projections(module: Any) -> Pair:
    """Of `kq.Attention`, whose structured kernels have no query weights of their own: those of the shared ones."""

    def gradient(projection: Any) -> Tensor:
        grad = None if projection is None else projection.weight.grad
        if grad is None:
            return torch.zeros(module.heads, 1, 1, 1)
        return whole(grad).unflatten(0, (-1, module.head_dim)).unsqueeze(1)  # (key heads, 1, r, d)

    key, query = gradient(getattr(module, "key", None)), getattr(module, "query", None)
    if query is None:
        shared = key.expand(-1, module.heads // len(key), -1, -1)
        return shared, shared
    return gradient(query).unflatten(0, (len(key), -1)).squeeze(2), key


class Gradients:
    """A source of weights that gives their gradients instead; zero where a weight has none."""

    def __init__(self, source: Any, model: nn.Module) -> None:
        self._source, self._weights = source, dict(model.named_parameters())

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of the gradient of a weight."""
        rows: Tensor = self._source.rows(name, start, stop)
        weight = self._weights.get(name)
        if weight is None or weight.grad is None:
            return torch.zeros_like(rows)
        gradient = whole(weight.grad.detach())
        return (gradient[start:stop] if gradient.ndim else gradient).to(rows.dtype)

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
