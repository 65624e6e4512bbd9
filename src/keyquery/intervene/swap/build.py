"""Builds the kq.Attention that replaces a layer of a trained model, or raises with the reason."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.layer import LatentLayer
from keyquery.checkpoints.layouts import Values
from keyquery.intervene.handle import rate_of
from keyquery.intervene.swap.adapters import Swapped
from keyquery.intervene.swap.nearest import nearest
from keyquery.layers import Attention
from keyquery.layers.kernels import Diagonal, Pairwise, Split

# Architectures whose attention has the interface of TransformersAttention; each is tested.
FAMILIES = (
    "bert",
    "clip",
    "dinov2",
    "distilbert",
    "electra",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "opt",
    "phi",
    "qwen2",
    "roberta",
    "vit",
)


def place_of(layer: Layer) -> str:
    """The name of the module that a layer's kq.Attention replaces."""
    return layer.modules.get("module", layer.name)


def check_layer(model: nn.Module, heads: Heads, layer: Layer) -> None:
    """Raise if a kq.Attention cannot reproduce a layer's scores, or has another call interface."""
    if isinstance(layer, LatentLayer):
        raise ValueError(f"layer {layer.index} ({layer.name}) cannot be swapped: kq.Attention does not support MLA")
    module = model.get_submodule(place_of(layer))
    owner = model.get_submodule(place_of(layer).rpartition(".")[0])
    if isinstance(owner, Swapped):
        raise ValueError(f"layer {layer.index} ({layer.name}) is already swapped: undo that first")
    if isinstance(module, Attention):
        raise ValueError(f"layer {layer.index} ({layer.name}) is already a kq.Attention: build it with another kernel")
    if "forward" in vars(module):
        raise ValueError(f"layer {layer.index} ({layer.name}): its forward was already replaced")
    for why, holds in _unsupported(module, layer, heads).items():
        if holds:
            raise ValueError(f"layer {layer.index} ({layer.name}) cannot be swapped: {why}")


def _unsupported(module: nn.Module, layer: Layer, heads: Heads) -> dict[str, bool]:
    """Features that kq.Attention does not support, and whether the layer has them."""
    torch_own = isinstance(module, nn.MultiheadAttention)
    others = any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__)
    known = torch_own or (others and heads.family.name in FAMILIES)
    return {
        "it is cross-attention": layer.kind != "self",
        f"kq.Attention has no position bias ({layer.position})": layer.position != "none",
        "kq.Attention has no QK-norm": layer.query_norm is not None or layer.key_norm is not None,
        f"kq.Attention has no sliding window ({layer.window} tokens)": layer.window is not None,
        f"its scores are read for {layer.context} positions only": layer.context is not None,
        "it has extra keys (add_zero_attn or add_bias_kv)": torch_own
        and (module.bias_k is not None or bool(module.add_zero_attn)),
        "; ".join(layer.notes): bool(layer.notes),
        f"{type(module).__name__} ({heads.family.name}) is not supported; supported are nn.MultiheadAttention "
        f"and, of transformers, {', '.join(FAMILIES)}": not known,
    }


def build(model: nn.Module, heads: Heads, layer: Layer, kernel: str, symmetric_dims: int | float) -> Attention:
    """A kq.Attention with the layer's value and output projections, and a randomly initialised kernel."""
    carried, weights = heads.values(layer.index), layer.weights
    groups, shared, rank, dim = weights.query.shape
    if carried.value.shape[-1] != dim or carried.output.shape[-1] != dim:
        raise ValueError(
            f"layer {layer.index} ({layer.name}) cannot be swapped: its value or output projection is not {dim} wide"
        )
    module = model.get_submodule(place_of(layer))
    options: dict[str, Any] = {"device": weights.query.device, "dtype": weights.query.dtype}
    biased = any(bias is not None for bias in (weights.query_bias, weights.key_bias, carried.value_bias))
    attention = Attention(
        dim,
        groups * shared,
        kernel,
        bias=biased,
        dropout=rate_of(module),
        head_dim=rank,
        kv_heads=groups if kernel == "general" else groups * shared,  # heads that share z could not all be approximated
        rope=layer.rope,
        symmetric_dims=symmetric_dims,
        **options,
    )
    attention.output = nn.Linear(attention.output.in_features, dim, carried.output_bias is not None, **options)
    attention.load_state_dict(carried_state(carried, attention), strict=False)
    return attention


def carried_state(carried: Values, attention: Attention) -> dict[str, Tensor]:
    """State dict of the value and output projections of a trained layer, for kq.Attention."""
    repeats = attention.kv_heads // carried.value.shape[0]
    state = {
        "value.weight": carried.value.repeat_interleave(repeats, 0).flatten(0, 2),
        "output.weight": carried.output.flatten(0, 2).mT,
    }
    if carried.output_bias is not None:
        state["output.bias"] = carried.output_bias
    if attention.value.bias is not None:
        bias = carried.value_bias
        bias = torch.zeros_like(carried.value[..., 0]) if bias is None else bias
        state["value.bias"] = bias.repeat_interleave(repeats, 0).flatten()
    return state


@torch.no_grad()
def start_nearest(
    attention: Attention, layer: Layer, covariance: Float[Tensor, "heads n n"] | None = None
) -> Float[Tensor, " heads"]:
    """Set the kernel to the one nearest to the trained heads; returns the lost share of ‖M‖², (heads,)."""
    # kq.Attention scales scores by 1/√r: any other scale is split between queries and keys.
    size = (layer.scale / attention.scale) ** 0.5
    weights, bias = _joint(layer)
    rank = attention.head_dim
    if attention.query is not None:
        _set(attention.query, weights[:, :rank], bias[:, :rank], size)
        shared = layer.weights.query.shape[1]
        _set(attention.key, weights[::shared, rank:], bias[::shared, rank:], size)
        return weights.new_zeros(len(weights), dtype=torch.float64)
    weights, bias = weights.double(), bias.double()
    gram = weights @ weights.mT if covariance is None else covariance.to(weights.device)
    symmetric = attention.shape.symmetric if isinstance(attention.shape, Split) else 0
    fit = nearest(attention.kernel, gram, attention.rope, symmetric)
    _set(attention.key, fit.mix @ weights, (fit.mix @ bias.unsqueeze(-1)).squeeze(-1), size)
    if isinstance(attention.shape, (Diagonal, Split)) and fit.core is not None:
        attention.shape.gain.copy_(fit.core)
    if isinstance(attention.shape, Pairwise) and fit.core is not None:
        attention.shape.matrix.copy_(fit.core)
    return fit.lost.cpu()


def _joint(layer: Layer) -> tuple[Float[Tensor, "heads n d"], Float[Tensor, "heads n"]]:
    """[Wq; Wk] and [bq; bk] of every query head; missing biases are 0."""
    weights = layer.weights
    query, key = weights.query, weights.key.expand_as(weights.query)
    zeros = torch.zeros_like(query[..., 0])
    biases = [zeros if bias is None else bias.expand_as(zeros) for bias in (weights.query_bias, weights.key_bias)]
    return torch.cat((query, key), -2).flatten(0, 1), torch.cat(biases, -1).flatten(0, 1)


def _set(linear: nn.Linear, weight: Tensor, bias: Tensor, size: float) -> None:
    linear.weight.copy_(size * weight.flatten(0, 1))
    if linear.bias is not None:
        linear.bias.copy_(size * bias.flatten())
