"""QK-Clip: query and key weights of single heads are scaled down, so that their largest logit is at most tau.

A head whose largest logit is s > tau has its scores multiplied by γ = tau/s. With keys of its own, its query and key
weights are each multiplied by √γ; where heads share keys (GQA), its query weights by γ. In latent attention (MLA), the
unrotated query and key rows are multiplied by √γ, the rotary query rows by γ, since all heads share the rotary key.

Relative position biases (T5), b at most, are not scaled: γ = (tau − b)/(s − b).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.layer import LatentLayer
from keyquery.instruments.monitor.weights import bias_table, has_bias_table

Factors = dict[str, Tensor]  # by parameter name: what it is multiplied by, elementwise


class Places:
    """A source of weights that gives, for every entry, its place among the entries of all parameters.

    Whatever slices and reshapes a layout makes, the places say where the entries of a head came from.
    """

    def __init__(self, source: Any, model: nn.Module) -> None:
        self._source, self.starts, start = source, {}, 0
        for name, weight in model.named_parameters():
            self.starts[name], start = start, start + weight.numel()

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Places of rows of a parameter, in float64, which is exact up to 2⁵³."""
        shape = self._source.shapes[name]
        size = 1
        for side in shape:
            size *= side
        begin = self.starts.get(name, 0)
        places = torch.arange(begin, begin + size, dtype=torch.float64).reshape(shape)
        return places[start:stop] if shape else places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def score_factor(heads: Heads, layer: Layer, head: int, largest: float, tau: float) -> float | None:
    """γ that brings a head's largest logit to at most tau; None if its relative position bias alone exceeds tau."""
    if layer.softcap is not None:  # the logit is c·tanh(s/c), and s is scaled
        cap = layer.softcap
        largest, tau = (cap * math.atanh(min(value / cap, 1 - 1e-7)) for value in (largest, tau))
    bias = 0.0
    if has_bias_table(layer):
        bias = max(bias_table(heads, layer)[:, head].max().item(), 0.0)
    return (tau - bias) / (largest - bias) if bias < tau else None


@torch.no_grad()
def clip_heads(model: nn.Module, heads: Heads, gammas: Mapping[int, Mapping[int, float]]) -> None:
    """Multiply the scores of heads by factors: `gammas[layer index][head]`. All other weights keep their bits."""
    weights = dict(model.named_parameters())
    factors: Factors = {}
    for index, of_layer in gammas.items():
        _factors(model, heads, index, of_layer, factors, weights)
    for name, factor in factors.items():
        weight = weights[name]
        factor = factor.reshape(weight.shape).to(weight.device, weight.dtype)
        weight.mul_(_like(factor, weight))


def _like(factor: Tensor, weight: Any) -> Tensor:
    """A factor distributed as a sharded parameter is (FSDP2)."""
    if not hasattr(weight, "placements"):
        return factor
    from torch.distributed.tensor import distribute_tensor  # a slow import

    return distribute_tensor(factor, weight.device_mesh, weight.placements)


def _factors(
    model: nn.Module, heads: Heads, index: int, gammas: Mapping[int, float], factors: Factors, weights: Any
) -> None:
    layer: Layer = heads[index]
    if layer.query_norm is not None or layer.key_norm is not None:
        raise ValueError(f"{layer.name} normalises its queries or keys: scaling their weights would change nothing")

    def put(name: str, places: Tensor, factor: float) -> None:
        if name not in weights:
            raise ValueError(f"{layer.name}: {name} is no parameter of the model: it cannot be clipped")
        blank = torch.ones(weights[name].numel(), dtype=torch.float64)
        factors.setdefault(name, blank)[places.flatten().long()] *= factor

    module = layer.modules.get("module")
    attention = None if module is None else model.get_submodule(module)
    if attention is not None and not isinstance(attention, nn.MultiheadAttention):
        _own(attention, str(module), layer, gammas, put)
    elif isinstance(layer, LatentLayer):
        _latent(heads, layer, gammas, put, weights)
    else:
        _read(model, heads, index, layer, gammas, put, with_keys=getattr(attention, "bias_k", None) is None)


def _own(module: Any, name: str, layer: Layer, gammas: Mapping[int, float], put: Any) -> None:
    """`kq.Attention`: structured kernels have one projection z for both sides, whose scores are quadratic in z."""
    start, groups = f"{name}." if name else "", layer.weights.query.shape[0]
    shared = layer.heads // groups

    def scale(role: str, head: int, factor: float) -> None:
        projection = getattr(module, role)
        for part in ("weight", "bias"):
            tensor = getattr(projection, part)
            if tensor is not None:
                places = torch.arange(tensor.numel()).reshape(-1, module.head_dim, *tensor.shape[1:])[head]
                put(f"{start}{role}.{part}", places, factor)

    for head, gamma in gammas.items():
        if getattr(module, "query", None) is None:
            scale("key", head, gamma**0.5)
        elif shared > 1:
            scale("query", head, gamma)
        else:
            scale("query", head, gamma**0.5)
            scale("key", head, gamma**0.5)


def _latent(heads: Heads, layer: LatentLayer, gammas: Mapping[int, float], put: Any, weights: Any) -> None:
    names, config = layer.modules, heads.config
    nope, rope = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    query = names.get("query_up", names.get("query", "")) + ".weight"
    key = names["key_up"] + ".weight"
    count = weights[query].shape[0] // (nope + rope) if query in weights else 0
    for head, gamma in gammas.items():
        rows = torch.arange(weights[query].numel()).reshape(count, nope + rope, -1)[head]
        put(query, rows[:nope], gamma**0.5)
        put(query, rows[nope:], gamma)
        ups = torch.arange(weights[key].numel()).reshape(count, -1, weights[key].shape[-1])[head]
        put(key, ups[:nope], gamma**0.5)


def _read(
    model: nn.Module,
    heads: Heads,
    index: int,
    layer: Layer,
    gammas: Mapping[int, float],
    put: Any,
    with_keys: bool,
) -> None:
    """Any other layout: the entries of a head are found by their positions, and must be those that were read.

    Queries are scaled alone if heads share keys, or not `with_keys`: `nn.MultiheadAttention` may add a learned key.
    """
    shown = copy.copy(heads)
    shown.source = places = Places(heads.source, model)
    found = shown[index].weights
    shared = layer.weights.query.shape[1]
    with_keys = with_keys and shared == 1
    flat = torch.cat([weight.detach().reshape(-1) for weight in _plain(model)])
    for role in ("query", "key", "query_bias", "key_bias"):
        at, own = getattr(found, role), getattr(layer.weights, role)
        if own is not None and not torch.equal(flat[at.long()].to(own), own):
            raise ValueError(f"{layer.name}: its {role} is no slice of a parameter: it cannot be clipped")
    for head, gamma in gammas.items():
        group, of_group = divmod(head, shared)
        for role in ("query", "query_bias"):
            if (at := getattr(found, role)) is not None:
                _put_places(places, at[group, of_group], gamma**0.5 if with_keys else gamma, put)
        for role in ("key", "key_bias") if with_keys else ():
            if (at := getattr(found, role)) is not None:
                _put_places(places, at[group, 0], gamma**0.5, put)


def _plain(model: nn.Module) -> list[Tensor]:
    return [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in model.parameters()]


def _put_places(places: Places, at: Tensor, factor: float, put: Any) -> None:
    starts = list(places.starts.values())
    names = list(places.starts)
    owner = torch.bucketize(at.flatten(), torch.tensor(starts, dtype=torch.float64), right=True) - 1
    for which in owner.unique().tolist():
        put(names[which], at.flatten()[owner == which] - starts[which], factor)
