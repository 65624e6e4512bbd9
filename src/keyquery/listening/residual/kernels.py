"""The scores of heads as bilinear functions of what enters their layer, with the norms of queries and keys frozen.

    s(i, j) = scale · R(i)Q_i(x_i) · R(j)K_j(x_j),     Q_i(x) = D(i)(W x + b) + β

with R the rotation of RoPE, and D(i) the factor by which QK-norm, or the latent norm of MLA, divides token i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.positions.relative import GIVEN
from keyquery.listening.parts.pairs import ScoredPairs

UNREAD = {
    "disentangled": "its scores have terms between contents and positions",
    "rotary": "its rotary positions are not read",
    "rotary before norm": "its queries and keys are normed after their rotation",
    "unread": "a term of positions in its scores is not read",
    **{kind: f"{term} is added to its scores" for kind, term in GIVEN.items()},
}
FROZEN = 1e-4  # relative error up to which frozen queries and keys equal the model's


@dataclass(frozen=True, eq=False)
class Slot:
    """The queries, or the keys, of some heads as an affine function of tokens."""

    weight: Float[Tensor, "heads r d"]
    bias: Float[Tensor, "#heads r"]
    shift: Float[Tensor, "#heads r"]
    factor: Float[Tensor, "batch heads tokens"]

    def __call__(
        self, x: Float[Tensor, "sources batch n d"], constant: Float[Tensor, " sources"]
    ) -> Float[Tensor, "sources batch heads n r"]:
        """What each source adds; `constant` is 1 for the source of biases, else 0."""
        constant = constant.to(x)[:, None, None, None, None]
        linear = x.unsqueeze(-3) @ self.weight.mT + constant * self.bias.unsqueeze(-2)
        return self.factor.unsqueeze(-1) * linear + constant * self.shift.unsqueeze(-2)

    def transposed(self, gradient: Float[Tensor, "batch heads n r"]) -> Float[Tensor, "batch heads n d"]:
        """The transposed map."""
        return (self.factor.unsqueeze(-1) * gradient) @ self.weight

    def at(self, token: int) -> Slot:
        """Frozen at one token, for whatever vector stands there."""
        return replace(self, factor=self.factor[..., token : token + 1])


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of some heads of a layer on a batch; an MLA head is the sum of two."""

    layer: Layer
    query: Slot
    key: Slot
    positions: Int[Tensor, "#batch n"]

    @classmethod
    def of(
        cls, layer: Layer, tokens: Float[Tensor, "batch n d"], pairs: ScoredPairs, head: int | None = None
    ) -> Kernel:
        """The kernel of a layer on what entered it, of all heads or of one."""
        if layer.position in UNREAD:
            raise ValueError(f"{layer.name} cannot be attributed: {UNREAD[layer.position]}")
        linear = layer.gained().apply(tokens, tokens)
        query, key = (
            _slot(layer, side, tokens, used, plain, head)
            for side, used, plain in zip(("query", "key"), layer.project(tokens), linear, strict=True)
        )
        return cls(layer, query, key, pairs.positions)

    def queries(
        self, x: Float[Tensor, "sources batch n d"], constant: Float[Tensor, " sources"], at: int | None = None
    ) -> Float[Tensor, "sources batch heads n r"]:
        """Scaled and rotated queries of each source; `at`: as if all tokens stood at this one."""
        slot = self.query if at is None else self.query.at(at)
        positions = self.positions if at is None else self.positions[:, at : at + 1]
        return self._rotated(slot(x, constant), positions) * self.layer.scale

    def keys(
        self, x: Float[Tensor, "sources batch n d"], constant: Float[Tensor, " sources"]
    ) -> Float[Tensor, "sources batch heads n r"]:
        """Rotated keys of each source."""
        return self._rotated(self.key(x, constant), self.positions)

    def from_queries(self, gradient: Float[Tensor, "batch heads n r"]) -> Float[Tensor, "batch heads n d"]:
        """The transposed map of `queries`, without its constant."""
        return self.query.transposed(self._back(gradient) * self.layer.scale)

    def from_keys(self, gradient: Float[Tensor, "batch heads n r"]) -> Float[Tensor, "batch heads n d"]:
        """The transposed map of `keys`, without its constant."""
        return self.key.transposed(self._back(gradient))

    def rotated(self, pairs: ScoredPairs) -> tuple[Float[Tensor, "batch heads n r"], Float[Tensor, "batch heads n r"]]:
        """The queries and keys of all sources together, as the model scores them."""
        return self._rotated(pairs.query, self.positions), self._rotated(pairs.key, self.positions)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.layer.rope is None else self.layer.rope.rotate(x, positions.unsqueeze(-2))

    def _back(self, x: Tensor) -> Tensor:
        """The transposed rotation: that by −t, whose factor on cosine and sine stays."""
        return self._rotated(x, -self.positions)


def position_bias(
    heads: Heads, layer: Layer, positions: Int[Tensor, "#batch n"]
) -> Float[Tensor, "batch heads n n"] | None:
    """The bias of positions (ALiBi, T5) on every pair of tokens; None if there is none."""
    offsets = positions.unsqueeze(-2) - positions.unsqueeze(-1)
    bias = heads.position_bias(layer, offsets.flatten().cpu())
    return None if bias is None else bias.unflatten(-1, offsets.shape).transpose(0, 1).to(positions.device)


def centred(scores: Float[Tensor, "*batch n n"], visible: Bool[Tensor, "*#batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Scores minus their mean over the visible keys of each query; 0 where a key is not visible."""
    weight = visible.to(scores)
    mean = (scores * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1)
    return (scores - mean) * weight


def _slot(layer: Layer, side: str, tokens: Tensor, used: Tensor, plain: Tensor, head: int | None) -> Slot:
    """The queries or keys of a layer as they were `used`, which are `plain` ones before their norm."""
    weights, norm = layer.gained(), getattr(layer, f"{side}_norm")
    weight, bias = getattr(weights, side), getattr(weights, f"{side}_bias")
    weight = _by_head(layer, weight).to(tokens)
    nothing = weight.new_zeros(1, weight.shape[-2])
    bias = nothing if bias is None else _by_head(layer, bias).to(tokens)
    shift = nothing if norm is None or norm.shift is None else _by_head(layer, norm.shift).to(tokens)
    factor = _factor(layer, _heads(layer, used) - shift.unsqueeze(-2), _heads(layer, plain))
    if head is None:
        return Slot(weight, bias, shift, factor)
    rows = slice(head, head + 1)
    bias, shift = (part if len(part) == 1 else part[rows] for part in (bias, shift))
    return Slot(weight[rows], bias, shift, factor[:, rows])


def _by_head(layer: Layer, tensor: Tensor) -> Tensor:
    """Weights, biases or shifts (groups, shared, …) with one row per query head."""
    groups, shared = layer.weights.query.shape[:2]
    return tensor.expand(groups, shared, *tensor.shape[2:]).flatten(0, 1)


def _heads(layer: Layer, x: Float[Tensor, "batch groups some n r"]) -> Float[Tensor, "batch heads n r"]:
    groups, shared = layer.weights.query.shape[:2]
    return x.expand(-1, groups, shared, -1, -1).flatten(1, 2)


def _factor(layer: Layer, used: Tensor, plain: Tensor) -> Float[Tensor, "batch heads n"]:
    """D with used = D·plain; raises if the norm of queries or keys is no such factor."""
    factor = (used * plain).sum(-1) / plain.square().sum(-1).clamp(min=torch.finfo(plain.dtype).tiny)
    error = (used - factor.unsqueeze(-1) * plain).abs().max()
    if error > FROZEN * used.abs().max():
        raise ValueError(f"{layer.name}: the norm of its queries and keys cannot be frozen")
    return factor
