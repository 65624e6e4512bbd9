"""What is made of a trained model without training: disguises, merges, pruning, stacking, quantisation, noise.

All take and give one model's weights, without the leading dimension of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from keyquery_studies.lineage.models import NAMES, Size, Weights

READS = ("query", "key", "value", "gate", "up")  # from the residual stream
WRITES = ("output", "down")
MATRICES = (*READS, *WRITES)


def with_layers(weights: Weights, layers: Sequence[int]) -> Weights:
    """Some layers, or some of them twice."""
    return {name: value[list(layers)] if name in NAMES else value for name, value in weights.items()}


def noisy(weights: Weights, size: float, generator: torch.Generator) -> Weights:
    """Gaussian noise on every matrix, relative to the standard deviation of its weights."""
    return {
        name: value + size * value.std() * torch.randn(value.shape, generator=generator) if name in MATRICES else value
        for name, value in weights.items()
    }


def folded(weights: Weights) -> Weights:
    """Gains of norms multiplied into the weights that read from them."""
    attention, mlp = weights["norm"][:, None], weights["mlp_norm"][:, None]
    gains = {"query": attention, "key": attention, "value": attention, "gate": mlp, "up": mlp}
    found = {name: weights[name] * gain for name, gain in gains.items()}
    ones = {name: torch.ones_like(weights[name]) for name in ("norm", "mlp_norm", "final_norm")}
    return {**weights, **found, **ones, "head": weights["head"] * weights["final_norm"]}


def turned(weights: Weights, rotation: Tensor) -> Weights:
    """The residual stream in another basis: x → x·R for an orthogonal R. The model computes the same."""
    weights = folded(weights)
    reads = {name: weights[name] @ rotation for name in (*READS, "embedding", "head")}
    return {**weights, **reads, **{name: rotation.T @ weights[name] for name in WRITES}}


def random_rotation(width: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix."""
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q.float()


def random_permutation(width: int, generator: torch.Generator) -> Tensor:
    """A permutation matrix."""
    return torch.eye(width)[torch.randperm(width, generator=generator)]


def heads_permuted(size: Size, weights: Weights, generator: torch.Generator) -> Weights:
    """Groups of heads in another order, in every layer its own. The model computes the same."""
    found = {name: weights[name].clone() for name in ("query", "key", "value", "output")}
    for layer in range(len(weights["query"])):
        order = torch.randperm(size.groups, generator=generator)
        if size.groups > 1 and torch.equal(order, torch.arange(size.groups)):
            order = order.roll(1)
        for name in ("query", "key", "value"):
            rows = weights[name][layer]
            found[name][layer] = rows.unflatten(0, (size.groups, -1))[order].flatten(0, 1)
        columns = weights["output"][layer].unflatten(1, (size.groups, -1))
        found["output"][layer] = columns[:, order].flatten(1, 2)
    return {**weights, **found}


def heads_rotated(size: Size, weights: Weights, generator: torch.Generator) -> Weights:
    """Queries and keys rotated within the planes of RoPE, each plane of a group by an angle of its own."""
    depth, half = len(weights["query"]), size.head_width // 2
    angles = 2 * torch.pi * torch.rand(depth, size.groups, 1, half, 1, generator=generator)

    def rotated(rows: Tensor) -> Tensor:
        first, second = rows.view(depth, size.groups, -1, 2, half, rows.shape[-1]).unbind(3)
        both = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
        return torch.stack(both, 3).reshape(rows.shape)

    return {**weights, "query": rotated(weights["query"]), "key": rotated(weights["key"])}


def heads_rescaled(size: Size, weights: Weights, generator: torch.Generator) -> Weights:
    """q·c and k/c, with another c per group. The model computes the same."""
    depth = len(weights["query"])
    factors = torch.exp(torch.randn(depth, size.groups, 1, 1, generator=generator))
    query, key = (weights[name].unflatten(1, (size.groups, -1)) for name in ("query", "key"))
    return {**weights, "query": (query * factors).flatten(1, 2), "key": (key / factors).flatten(1, 2)}


def disguised(size: Size, weights: Weights, generator: torch.Generator) -> Weights:
    """All of these together."""
    weights = turned(weights, random_rotation(size.width, generator) @ random_permutation(size.width, generator))
    for change in (heads_permuted, heads_rotated, heads_rescaled):
        weights = change(size, weights, generator)
    return weights


def merged(first: Weights, second: Weights, share: float) -> Weights:
    """share·first + (1 − share)·second."""
    return {name: share * first[name] + (1 - share) * second[name] for name in first}


def slerped(first: Weights, second: Weights, share: float) -> Weights:
    """Spherical interpolation of every tensor, as mergers do it: share of `first`."""
    found = {}
    for name, one in first.items():
        other = second[name]
        cosine = (one.flatten() @ other.flatten()) / (one.norm() * other.norm())
        angle = cosine.clamp(-1, 1).arccos()
        if angle < 1e-4:
            found[name] = share * one + (1 - share) * other
        else:
            found[name] = ((share * angle).sin() * one + ((1 - share) * angle).sin() * other) / angle.sin()
    return found


def task_vectors(base: Weights, tuned: Sequence[Weights]) -> Weights:
    """base + Σ (tuned − base)."""
    return {name: value + sum(model[name] - value for model in tuned) for name, value in base.items()}


def quantised(weights: Weights, kind: str) -> Weights:
    """Every matrix rounded and read back: "Q8_0" and "Q4_0" as in GGUF, "FP8" with one scale per matrix."""
    rounding = {"Q8_0": q8_0, "Q4_0": q4_0, "FP8": fp8}[kind]
    return {name: rounding(value) if name in MATRICES else value for name, value in weights.items()}


def q8_0(value: Tensor) -> Tensor:
    """Blocks of 32 as 8-bit integers with a half-precision scale."""
    blocks = value.float().numpy().reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return _blocks(_away(blocks * inverse) * scale.astype(np.float16).astype(np.float32), value)


def q4_0(value: Tensor) -> Tensor:
    """Blocks of 32 as 4-bit integers, from −8 to 7, with a half-precision scale."""
    blocks = value.float().numpy().reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    scale = largest / -8
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    integers = np.trunc(blocks * inverse + np.float32(8.5)).clip(0, 15) - 8
    return _blocks(integers * scale.astype(np.float16).astype(np.float32), value)


def _away(values: np.ndarray) -> np.ndarray:
    """Rounded, halves away from zero."""
    whole = np.floor(np.abs(values))
    return np.sign(values) * (whole + np.floor(2 * (np.abs(values) - whole)))


def _blocks(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).view(like.shape)


def fp8(value: Tensor) -> Tensor:
    """E4M3 with one scale per matrix of a layer."""
    scale = value.abs().amax((-2, -1), keepdim=True) / 448
    return (value / scale).to(torch.float8_e4m3fn).float() * scale
