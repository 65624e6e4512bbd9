"""What a record holds of the weights: σ₁ and bounds of all heads, gradient norms, ranks and shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.has_form import FormedHeads, MixedHeads, formed
from keyquery.checkpoints.layer import LatentLayer, Norm, Projections
from keyquery.instruments.monitor.bound import latent_bound, logit_bound
from keyquery.instruments.monitor.gradients import anchors_of, head_norms, read_gradients, whole
from keyquery.instruments.monitor.observation import Seen
from keyquery.instruments.monitor.structure import Ranks, part_shares


def module_of(name: str, modules: Mapping[str, Any]) -> str:
    """The module of a layer; both kernels of latent attention belong to one."""
    name = name.removesuffix(" (nope)").removesuffix(" (rope)")
    return "" if name == "attention" and name not in modules else name


class Layers:
    """The attention layers of a model that is trained, read anew only where their weights are copies.

    Most layouts give views of the parameters, which training changes in place: reading them again would cost more than
    all else that a record does.
    """

    def __init__(self, heads: Heads, model: nn.Module) -> None:
        self.ranks: Ranks | None = None  # effective ranks of the last record that measured them, until they are taken
        self.heads, self._model, modules = heads, model, dict(model.named_modules())
        self._own = formed(model) if isinstance(heads, FormedHeads) else []  # modules that are read by themselves
        self._kept = [self._read(index) for index in range(len(heads))]
        self._modules = {layer.index: module_of(layer.name, modules) for layer in self._kept}
        self._anchors = [anchors_of(layer, model, self._modules[layer.index]) for layer in self._kept]
        self.counts = {self._modules[layer.index]: layer.heads for layer in self._kept}
        # Of latent attention, the unrotated kernel stands for its module.
        self.index = {self._modules[layer.index]: layer.index for layer in reversed(self._kept)}

    def now(self, names: Iterable[str]) -> dict[str, Layer]:
        """Layers with their current weights, by module."""
        known = {name: self.index[name] for name in names if name in self.index}
        for name, index in known.items():
            if not self._live(index):
                self._kept[index] = self._read(index)
                self._anchors[index] = anchors_of(self._kept[index], self._model, name)
        return {name: self._kept[index] for name, index in known.items()}

    def _live(self, index: int) -> bool:
        """Whether all that a layer was read as are views of the model's parameters."""
        anchors = self._anchors[index]
        return anchors is not None and anchors.hold()

    def _read(self, index: int) -> Layer:
        with gathered(self._model.get_submodule(self._own[index])) if self._own else nullcontext():
            return self.heads[index]

    def scales(self) -> dict[str, float]:
        """The factor of the scores, by module."""
        return {name: float(self._kept[index].scale) for name, index in self.index.items()}

    @torch.no_grad()
    def measure(
        self, seen: Mapping[str, Seen], largest: Mapping[str, Tensor], whole: bool
    ) -> dict[str, dict[str, Tensor]]:
        """σ₁, bounds, and, if `whole`, shares, by module; effective ranks are then computed into `ranks`.

        `largest` has the largest ‖x‖ of the inputs, by module.
        """
        layers = {n: layer for n, layer in self.now(seen).items() if layer.heads == seen[n].statistics[0].shape[-1]}
        unknown = torch.full((), math.nan)
        norms = {layer.name: largest.get(name, unknown) for name, layer in layers.items()}
        found = bounds([self._plain(layer) for layer in layers.values()], norms) if layers else {}
        results: dict[str, dict[str, Tensor]] = {}
        for name, layer in layers.items():
            sigma, bound = found[layer.name]
            if isinstance(layer, LatentLayer):
                kernels = [self._read(index) for index in self._indices(name)]
                bound = latent_bound([each for each in kernels if isinstance(each, LatentLayer)], norms[layer.name])
            elif has_bias_table(layer):
                bound = bound + bias_table(self.heads, layer).amax(0).to(bound)
            results[name] = {"sigma": sigma, "bound": bound}
        if whole:
            for name, parts in part_shares(self.heads, layers, seen).items():
                results[name] |= parts
            self.ranks = Ranks(layers)
        return results

    def _plain(self, layer: Layer) -> Layer:
        """A layer without a relative position bias, whose largest entry is added to its bound."""
        return replace(layer, position="none") if has_bias_table(layer) else layer

    def _indices(self, module: str) -> list[int]:
        return [index for index, name in self._modules.items() if name == module]

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """‖∂L/∂W_q‖ and ‖∂L/∂W_k‖ of every head, by module."""
        modules = {layer.name: self._modules[layer.index] for layer in reversed(self._kept)}
        norms = head_norms(self._gradient_views() or read_gradients(self.heads, self._model, modules))
        return {module: norms[name] for name, module in modules.items() if name in norms}

    def _gradient_views(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Gradients of all layers where their weights are; empty if some layer's are no views, or have no gradient."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, anchors in zip(self._kept, self._anchors, strict=True):
            if anchors is None or not anchors.hold() or isinstance(self.heads, MixedHeads):
                return {}
            query, key = anchors.by_role["query"].gradient(), anchors.by_role["key"].gradient()
            if query is None or key is None:
                return {}
            found[layer.name] = query, key
        return found


def has_bias_table(layer: Layer) -> bool:
    """Whether a relative position bias is added to its scores (T5)."""
    return layer.position == "t5" and "bias_table" in layer.modules


def bias_table(heads: Heads, layer: Layer) -> Tensor:
    """The biases of a layer that has them, (buckets, heads)."""
    return heads.source.rows(layer.modules["bias_table"] + ".weight").double()


def bounds(layers: Sequence[Layer], norms: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """σ₁(M) and the bound of every head, by layer name; layers alike are computed as one, to save kernel launches."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(_likeness(layer), []).append(layer)
    for alike in groups.values():
        sizes = torch.cat([norms[layer.name].expand(layer.weights.query.shape[0], 1) for layer in alike])
        joined = logit_bound(_joined(alike), sizes.to(alike[0].weights.query.device, torch.float64))
        splits = [layer.heads for layer in alike]
        for layer, sigma, bound in zip(alike, joined.sigma.split(splits), joined.bound.split(splits), strict=True):
            found[layer.name] = sigma, bound
    return found


def _likeness(layer: Layer) -> Any:
    """Layers with the same are bounded together: all but their weights and gains is equal."""
    weights, rope = layer.weights, layer.rope
    alone = isinstance(layer, LatentLayer) or layer.early_rope or layer.axial or layer.learned or layer.pool
    norms = tuple(
        None if norm is None else (norm.kind, tuple(norm.gain.shape), norm.by_head, norm.shift is None)
        for norm in (layer.query_norm, layer.key_norm)
    )
    # A norm over all heads, or with a shift, which has no shape for several layers.
    over_all = any(norm is not None and (norm[1][:2] != (1, 1) or not norm[3]) for norm in norms)
    if alone or over_all:
        return layer.name
    turned = None if rope is None else (rope.dims, float(rope.factor))
    biased = weights.query_bias is None, weights.key_bias is None
    shape = tuple(weights.query.shape[1:])
    return shape, turned, biased, norms, layer.scale, layer.position, layer.softcap, weights.query.device


def _joined(layers: Sequence[Layer]) -> Layer:
    if len(layers) == 1:
        return layers[0]

    def cat(name: str) -> Any:
        parts = [getattr(layer.weights, name) for layer in layers]
        return None if parts[0] is None else torch.cat(parts).double()

    def norm(name: str) -> Norm | None:
        norms = [getattr(layer, name) for layer in layers]
        if norms[0] is None:
            return None
        wide = [
            each.gain.expand(layer.weights.query.shape[0], 1, -1) for each, layer in zip(norms, layers, strict=True)
        ]
        return replace(norms[0], gain=torch.cat(wide), shift=None, by_head=True)

    weights = Projections(*map(cat, ("query", "key", "query_bias", "key_bias")))
    return replace(layers[0], weights=weights, query_norm=norm("query_norm"), key_norm=norm("key_norm"))


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
