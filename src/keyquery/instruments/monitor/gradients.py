"""Query and key weights as views of a model's parameters, and the norms of their gradients, per head."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads
from keyquery.checkpoints.has_form import FormedHeads, MixedHeads
from keyquery.checkpoints.layer import LatentLayer, Layer

Pairs = Mapping[str, tuple[Tensor, Tensor]]  # by layer name: of query and key weights, (groups, shared or 1, r, d)


def whole(tensor: Any) -> Tensor:
    """A tensor gathered from the processes that share it (FSDP2); any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclass(frozen=True)
class Anchor:
    """A tensor that is a view of a parameter."""

    view: Tensor
    weight: Tensor
    address: int  # of the parameter's data

    def gradient(self) -> Tensor | None:
        """The view's part of the parameter's gradient; None if it has none, or one of another layout."""
        gradient, weight, view = self.weight.grad, self.weight, self.view
        if gradient is None or gradient.stride() != weight.stride() or type(gradient) is not Tensor:
            return None
        start = gradient.storage_offset() + view.storage_offset() - weight.storage_offset()
        return gradient.as_strided(view.shape, view.stride(), start)


@dataclass(frozen=True)
class Anchors:
    """The tensors of a layer as views of a model's parameters, and the ways from the model to these."""

    by_role: dict[str, Anchor]
    ways: Sequence[tuple[dict[str, Any], str, Any]]  # dicts of modules and of parameters, and what each must hold

    def hold(self) -> bool:
        """Whether the model still has these parameters, at their places; views keep memory from being used again."""
        for table, name, value in self.ways:  # without generators: this runs for every layer of every record
            if table.get(name) is not value:
                return False
        return all(anchor.weight.data_ptr() == anchor.address for anchor in self.by_role.values())


def anchors_of(layer: Layer, model: nn.Module, name: str) -> Anchors | None:
    """Anchors of all tensors of a layer, read from module `name`; None if some are no views of its parameters."""
    if isinstance(layer, LatentLayer):
        return None
    weights = {
        weight.untyped_storage().data_ptr(): (path, weight)
        for path, weight in model.get_submodule(name).named_parameters(prefix=name, remove_duplicate=False)
        if not hasattr(weight, "placements")  # shared out among processes
    }
    anchors: dict[str, Anchor] = {}
    ways: dict[Any, tuple[dict[str, Any], str, Any]] = {}
    for role, tensor in _tensors(layer).items():
        path, weight = weights.get(tensor.untyped_storage().data_ptr(), ("", tensor))
        if not path:
            return None
        anchors[role] = Anchor(tensor, weight, weight.data_ptr())
        ways |= {(id(table), key): (table, key, value) for table, key, value in _way(model, path)}
    return Anchors(anchors, tuple(ways.values()))


def _tensors(layer: Layer) -> dict[str, Tensor]:
    tensors = {role: getattr(layer.weights, role) for role in ("query", "key", "query_bias", "key_bias")}
    for role in ("query_norm", "key_norm"):
        norm = getattr(layer, role)
        tensors |= {} if norm is None else {f"{role} gain": norm.gain, f"{role} shift": norm.shift}
    return {role: tensor for role, tensor in tensors.items() if tensor is not None}


def _way(model: nn.Module, path: str) -> Iterator[tuple[dict[str, Any], str, Any]]:
    *parents, last = path.split(".")
    module: Any = model
    for name in parents:
        yield module._modules, name, module._modules[name]
        module = module._modules[name]
    yield module._parameters, last, module._parameters[last]


def read_gradients(heads: Heads, model: nn.Module, modules: Mapping[str, str]) -> Pairs:
    """Gradients of query and key weights by layer name, in any layout; empty if no weight has one.

    `modules` has the module of every layer.
    """
    if isinstance(heads, MixedHeads) or all(weight.grad is None for weight in model.parameters()):
        return {}
    if isinstance(heads, FormedHeads):
        return {name: _own_gradients(model.get_submodule(module)) for name, module in modules.items()}
    shown = copy.copy(heads)
    shown.source = Gradients(heads.source, model)
    return {layer.name: (layer.weights.query, layer.weights.key) for layer in shown}


def head_norms(gradients: Pairs) -> dict[str, tuple[Tensor, Tensor]]:
    """‖∂L/∂W_q‖ and ‖∂L/∂W_k‖ of every head, by layer name. Heads that share keys have the norm of the shared ones.

    Layers alike are computed as one, to save kernel launches.
    """
    groups: dict[Any, list[str]] = {}
    for name, (query, key) in gradients.items():
        groups.setdefault((query.shape, key.shape, query.dtype, query.device), []).append(name)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for names in groups.values():
        queries, keys = (_norms([gradients[name][side] for name in names]) for side in (0, 1))
        shape = torch.broadcast_shapes(queries.shape, keys.shape)
        rows = zip(queries.expand(shape).flatten(1), keys.expand(shape).flatten(1), strict=True)
        found |= dict(zip(names, rows, strict=True))
    return found


def _norms(gradients: list[Tensor]) -> Tensor:
    stack = torch.stack(gradients)
    wide = torch.float64 if stack.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(stack, dim=(-2, -1), dtype=wide)


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


def _own_gradients(module: Any) -> tuple[Tensor, Tensor]:
    """Of `kq.Attention`, whose structured kernels have no query weights of their own: those of the shared ones."""

    def gradient(projection: Any) -> Tensor:
        own = None if projection is None else projection.weight.grad
        if own is None:
            return torch.zeros(module.heads, 1, 1, 1)
        by_head = whole(own).unflatten(0, (-1, module.head_dim))
        return by_head.unsqueeze(1)  # (key heads, 1, r, d)

    key, query = gradient(getattr(module, "key", None)), getattr(module, "query", None)
    if query is None:
        shared = key.expand(-1, module.heads // len(key), -1, -1)
        return shared, shared
    return gradient(query).unflatten(0, (len(key), -1)).squeeze(2), key
