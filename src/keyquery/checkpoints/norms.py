"""Norms of a layer: of the tokens that feed it, and of its queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from keyquery.checkpoints.family import Attention
from keyquery.checkpoints.layer import Norm, Projections
from keyquery.checkpoints.layouts import read_rows
from keyquery.checkpoints.locations import Location
from keyquery.checkpoints.positions.sequence import is_rotated
from keyquery.checkpoints.sources import Source

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def read_norms(location: Location, source: Source, config: Mapping[str, Any], weights: Projections) -> dict[str, Norm]:
    """The norms of a layer, by the fields of Layer that hold them."""
    attention, names = location.attention, location.names
    feeding = "norm" if "norm" in names else "first_norm"
    groups, shared, rank, width = weights.query.shape
    norms = {}
    for role, called, fed in ((feeding, "norm", "query"), ("memory_norm", "memory_norm", "key")):
        size = token_width(location, source, fed, width)
        projected = (
            role == "first_norm" and role in names and source.shapes[names[role] + attention.norm_weight] != (size,)
        )
        if role in names and not projected:  # embeddings may be of another width, and projected after their norm
            norm = _norm(source, names[role], attention.norm_kind, attention, config, (size,))
            norm = norm if attention.norm_eps is None else replace(norm, eps=attention.norm_eps)
            norms[called] = _times(norm, config.get(attention.norm_factor) if attention.norm_factor else None)
    for role, heads in (("query_norm", (groups, shared)), ("key_norm", (groups, 1))):
        if role in names:
            sizes = (rank, math.prod(heads) * rank)
            apart = attention.qk_norm_by_head and names[role].endswith(".0")
            parts = [f"{names[role][:-1]}{head}" for head in range(math.prod(heads))] if apart else [names[role]]
            norm = _joined([_norm(source, part, attention.qk_norm_kind, attention, config, sizes) for part in parts])
            norm = norm if attention.qk_norm_eps is None else replace(norm, eps=attention.qk_norm_eps)
            shape = (1, 1, rank) if norm.gain.numel() == rank else (*heads, rank)
            shift = None if norm.shift is None else norm.shift.reshape(shape)
            gain = norm.gain.reshape(shape) * (dim_scale(location, source) if role == "query_norm" else 1.0)
            norms[role] = Norm(norm.kind, gain, shift, norm.eps, attention.qk_norm_by_head)
        elif attention.unit_norm and (is_rotated(attention, config, location.layer) or not attention.norm_after_rope):
            gain = weights.query.new_full((1, 1, rank), 1.0 if attention.unit_norm == "rms" else rank**-0.5)
            if role == "query_norm" and "head_scale" in names:  # at most 100
                factor = read_rows(source, names["head_scale"]).clamp(max=math.log(100)).exp()
                gain = gain * factor.reshape(groups, shared, 1)
            eps = epsilon(attention, config) if attention.qk_norm_eps is None else attention.qk_norm_eps
            norms[role] = Norm("rms", gain, None, eps, by_head=True)
    return norms


def _times(norm: Norm, factor: Any) -> Norm:
    """A norm whose result is multiplied by a number of the config."""
    if factor is None:
        return norm
    return replace(norm, gain=norm.gain * factor, shift=None if norm.shift is None else norm.shift * factor)


def _joined(norms: list[Norm]) -> Norm:
    """The norms of single heads as one."""
    shifts = [norm.shift for norm in norms if norm.shift is not None]
    gain, shift = torch.cat([norm.gain for norm in norms]), torch.cat(shifts) if shifts else None
    return replace(norms[0], gain=gain, shift=shift)


def dim_scale(location: Location, source: Source) -> Tensor | float:
    """Learned factors of a query's dimensions, which are 1 where the stored values are 0."""
    if "dim_scale" not in location.names:
        return 1.0
    return softplus(read_rows(source, location.names["dim_scale"]).double()).float() / math.log(2)


def token_width(location: Location, source: Source, role: str, width: int) -> int:
    """The width of the tokens that queries or keys are made of, which differ in some cross-attention."""
    attention = location.attention
    if attention.kind != "cross" or attention.order != "apart":
        return width
    return int(source.shapes[location.names[role] + attention.weight][0 if attention.transposed else -1])


def _norm(
    source: Source, name: str, kind: str, attention: Attention, config: Mapping[str, Any], sizes: tuple[int, ...]
) -> Norm:
    weight, bias = attention.norm_weight, attention.norm_bias
    if kind == "by shift":
        kind = "layer" if name + bias in source.shapes else "rms"
    gain = read_rows(source, name + weight)
    shift = read_rows(source, name + bias) if kind == "layer" and name + bias in source.shapes else None
    for ending, tensor in ((weight, gain), (bias, shift)):
        if tensor is not None and tensor.numel() not in sizes:
            expected = " or ".join(map(str, dict.fromkeys(sizes)))
            raise ValueError(f"{name}{ending} has {tensor.numel()} values, expected {expected}")
        require_finite(name + ending, tensor, "values")
    offset = attention.gain_offset
    return Norm(kind, gain + offset if offset else gain, shift, epsilon(attention, config))


def epsilon(attention: Attention, config: Mapping[str, Any]) -> float:
    """What norms add to the variance."""
    return next((float(config[key]) for key in EPSILONS if config.get(key) is not None), attention.eps)


def require_finite(name: str, tensor: Tensor | None, what: str) -> None:
    """Raise if values of a tensor are NaN or infinite."""
    # A finite sum has finite terms: one pass unless something is wrong.
    if tensor is not None and not tensor.sum().isfinite():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {tensor.numel()} {what} are NaN or infinite")
