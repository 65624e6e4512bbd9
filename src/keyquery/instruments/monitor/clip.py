"""QK-Clip: query and key weights of single heads are scaled down, so that their largest logit is at most tau.

A head whose largest logit is s > tau has its scores multiplied by γ = tau/s. With keys of its own, its query and key
weights, and their biases, are each multiplied by √γ; where heads share keys (GQA), its query weights and bias by γ. In
latent attention (MLA), the unrotated query and key rows are multiplied by √γ, the rotary query rows by γ, since all
heads share the rotary key. Relative position biases (T5), b at most, are not scaled: γ = (tau − b)/(s − b).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.layer import LatentLayer
from keyquery.instruments.monitor.bound import bias_table, has_bias_table
from keyquery.instruments.monitor.layers import Layers, whole

Scaled = Iterator[tuple[Tensor, float]]  # parts of weights, and what they are multiplied by


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
def clip_record(
    record: Mapping[str, Any], heads: Sequence[Mapping[str, Any]], model: nn.Module, layers: Layers, tau: float
) -> list[dict[str, Any]]:
    """Clip the heads whose largest logit in a record exceeds tau."""
    values = record["values"].get("largest", [None] * len(heads))  # left out where all are NaN
    high = {n: value for n, value in enumerate(values) if value is not None and value > tau}
    modules = {n: heads[n]["name"].rpartition(".")[0] for n in high}
    now = layers.now(set(modules.values()))
    clips: list[dict[str, Any]] = []
    gammas: dict[int, dict[int, float]] = {}
    for n, largest in high.items():
        layer, head = now[modules[n]], heads[n]
        gamma = score_factor(layers.heads, layer, head["head"], largest, tau)
        if gamma is None:
            message = f"{head['name']} is not clipped: its relative position bias alone exceeds {tau:g}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            continue
        gammas.setdefault(layer.index, {})[head["head"]] = gamma
        clips.append({"step": record["step"], "name": head["name"], "largest": largest, "factor": gamma})
    clip_heads(model, layers.heads, gammas)
    return clips


class Weights:
    """A source of a model's weights, to be changed in place; shared ones (FSDP2) are whole until `write`."""

    def __init__(self, source: Any, model: nn.Module) -> None:
        self._source, self._held = source, model.state_dict(keep_vars=True)
        self._whole: dict[str, Tensor] = {}

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a weight, as a view of it."""
        if name not in self._held:
            raise ValueError(f"{name} is no parameter of the model: it cannot be clipped")
        tensor = self._whole.setdefault(name, whole(self._held[name].detach()))
        return tensor[start:stop] if tensor.ndim else tensor

    def hold(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of a weight."""
        plain = [weight for weight in self._held.values() if not hasattr(weight, "placements")]
        held = {weight.untyped_storage().data_ptr() for weight in (*plain, *self._whole.values())}
        return tensor.untyped_storage().data_ptr() in held

    def write(self) -> None:
        """Give every process its part of the weights that are shared."""
        for name, tensor in self._whole.items():
            weight: Any = self._held[name]
            if hasattr(weight, "placements"):
                from torch.distributed.tensor import distribute_tensor  # a slow import

                weight.detach().copy_(distribute_tensor(tensor, weight.device_mesh, weight.placements))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@torch.no_grad()
def clip_heads(model: nn.Module, heads: Heads, gammas: Mapping[int, Mapping[int, float]]) -> None:
    """Multiply the scores of heads by factors: `gammas[layer index][head]`. All other weights keep their bits."""
    weights = Weights(heads.source, model)
    shown = copy.copy(heads)
    shown.source = weights
    parts = [part for index, of_layer in gammas.items() for part in _parts(model, shown, index, of_layer, weights)]
    for tensor, factor in parts:
        tensor.mul_(factor)
    weights.write()


def _parts(model: nn.Module, heads: Heads, index: int, gammas: Mapping[int, float], weights: Weights) -> Scaled:
    """What of a layer is scaled."""
    layer: Layer = heads[index]
    if layer.query_norm is not None or layer.key_norm is not None:
        raise ValueError(f"{layer.name} normalises its queries or keys: scaling their weights would change nothing")
    module = layer.modules.get("module")
    attention: Any = None if module is None else model.get_submodule(module)
    if attention is not None and not isinstance(attention, nn.MultiheadAttention):
        return _of_attention(attention, f"{module}." if module else "", layer, gammas, weights)
    if isinstance(layer, LatentLayer):
        return _of_latent(heads, layer, gammas, weights)
    for role, tensor in vars(layer.weights).items():
        if tensor is not None and not weights.hold(tensor):
            raise ValueError(f"{layer.name}: its {role} is no slice of a parameter: it cannot be clipped")
    return _of_views(layer, gammas, with_keys=getattr(attention, "bias_k", None) is None)


def _of_attention(module: Any, start: str, layer: Layer, gammas: Mapping[int, float], weights: Weights) -> Scaled:
    """`kq.Attention`: structured kernels have one projection z for both sides, whose scores are quadratic in z."""
    grouped = layer.weights.query.shape[1] > 1
    roles = ("key",) if getattr(module, "query", None) is None else ("query",) if grouped else ("query", "key")
    for head, gamma in gammas.items():
        for role in roles:
            for part, _ in getattr(module, role).named_parameters():
                rows = weights.rows(f"{start}{role}.{part}").unflatten(0, (-1, module.head_dim))
                yield rows[head], gamma if grouped and role == "query" else gamma**0.5


def _of_latent(heads: Heads, layer: LatentLayer, gammas: Mapping[int, float], weights: Weights) -> Scaled:
    names, config = layer.modules, heads.config
    nope, rope = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    query = weights.rows(names.get("query_up", names.get("query", "")) + ".weight").unflatten(0, (-1, nope + rope))
    key = weights.rows(names["key_up"] + ".weight").unflatten(0, (len(query), -1))
    for head, gamma in gammas.items():
        yield query[head, :nope], gamma**0.5
        yield query[head, nope:], gamma
        yield key[head, :nope], gamma**0.5


def _of_views(layer: Layer, gammas: Mapping[int, float], with_keys: bool) -> Scaled:
    """Queries alone if heads share keys, or not `with_keys`: `nn.MultiheadAttention` may add a learned key."""
    weights, shared = layer.weights, layer.weights.query.shape[1]
    with_keys = with_keys and shared == 1
    for head, gamma in gammas.items():
        group, of_group = divmod(head, shared)
        for tensor in (weights.query, weights.query_bias):
            if tensor is not None:
                yield tensor[group, of_group], gamma**0.5 if with_keys else gamma
        for tensor in (weights.key, weights.key_bias) if with_keys else ():
            if tensor is not None:
                yield tensor[group, 0], gamma**0.5
