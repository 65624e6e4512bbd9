"""The score of one head as a table: query-side source by key-side source, which sums to the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.listening.residual.kernels import Kernel, centred, position_bias
from keyquery.listening.residual.recording import Recording, features_of, sources_of
from keyquery.listening.residual.terms import BIAS
from keyquery.support.checks import check_float

Features = Mapping[str, tuple[Tensor, Tensor]]
SAME = 1e-3  # difference of attention weights above which scores are not the model's
ORDERS, LEVEL = 100, 0.95  # random orders of a null level, and the percentile over them
POSITION = "position bias"  # the source of ALiBi and T5's bias, which belongs to pairs of tokens


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Queries and keys of one head by source, on one sequence; kernels that belong to one head are added."""

    names: list[str]  # one of them BIAS, of the biases of queries and keys
    values: Float[Tensor, "sources 1 n d"]  # what each source adds to the layer's input
    kernels: Sequence[Kernel]
    visible: Bool[Tensor, "n n"]
    bias: Float[Tensor, "n n"] | None = None  # of positions

    @classmethod
    def of(
        cls, record: Recording, heads: Heads, layers: Sequence[Layer], head: int, features: Features | None = None
    ) -> HeadScores:
        """The scores of a head by source, on a run of one sequence; raises if they are not those of the model."""
        first = layers[0]
        entered, pairs = record.of(first), record.pairs[first.index]
        tokens = entered.tokens.float()
        if features is None:
            sources = sources_of(entered, first.name)
        else:
            _check_features(features, *tokens.shape[1:])
            sources = features_of(entered, features, first.name)
        sources.setdefault(BIAS, torch.zeros_like(tokens))
        kernels = [Kernel.of(layer, tokens, record.pairs[layer.index], head) for layer in layers]
        visible = pairs.visible[0, head if pairs.visible.shape[1] > 1 else 0]
        bias = position_bias(heads, first, pairs.positions)
        values = torch.stack(list(sources.values()))
        scores = cls(list(sources), values, kernels, visible, None if bias is None else bias[0, head])
        attended = record.weights(first)
        if attended is not None and attended.call.query.dtype == torch.float32:
            scores._check(attended.weights.reshape(1, -1, *visible.shape)[0, head].double())
        return scores

    def _check(self, weights: Float64[Tensor, "n n"]) -> None:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)  # without the share of a learned sink
        if float((weights - self.weights()).abs()[self.visible.any(-1)].max()) > SAME:
            raise ValueError(f"{self.layer.name}: the scores read from its weights are not those of the model")

    @property
    def layer(self) -> Layer:
        """The layer of the head, or the first of two."""
        return self.kernels[0].layer

    @property
    def sources(self) -> list[str]:
        """Names of the rows and columns of tables."""
        return self.names if self.bias is None else [*self.names, POSITION]

    @cached_property
    def _constant(self) -> Float[Tensor, " sources"]:
        return torch.tensor([float(name == BIAS) for name in self.names])

    @cached_property
    def queries(self) -> Float64[Tensor, "sources n r"]:
        """Scaled and rotated queries of each source."""
        return self._vectors("query", self.values, self._constant)

    @cached_property
    def keys(self) -> Float64[Tensor, "sources n r"]:
        """Rotated keys of each source."""
        return self._vectors("key", self.values, self._constant)

    def _vectors(self, side: str, writes: Tensor, constant: Tensor, **at: int) -> Float64[Tensor, "sources n r"]:
        """Queries or keys of writes; kernels are concatenated."""
        vectors = [
            (kernel.queries if side == "query" else kernel.keys)(writes, constant, **at) for kernel in self.kernels
        ]
        return torch.cat([vector[:, 0, 0] for vector in vectors], -1).double()

    @cached_property
    def scores(self) -> Float64[Tensor, "n n"]:
        """The scores of all pairs: the sum over sources on both sides."""
        return self._scores(self.queries.sum(0), self.keys.sum(0))

    def _scores(self, query: Float64[Tensor, "n r"], key: Float64[Tensor, "n r"]) -> Float64[Tensor, "n n"]:
        return query @ key.mT if self.bias is None else query @ key.mT + self.bias

    def pair(self, i: int, j: int) -> dict[str, Float[Tensor, "sources sources"]]:
        """The table of query i and key j: "raw", "relative" to the mean visible key, and its symmetric part."""
        seen, query, keys = self.visible[i], self.queries[:, i], self.keys
        raw, mean = query @ keys[:, j].mT, query @ keys[:, seen].mean(1).mT
        tables = {"raw": raw, "relative": raw - mean, "symmetric": (raw - mean + self._swapped(i, j, seen)) / 2}
        if self.bias is None:
            return tables
        bias, relative = self.bias[i, j], self.bias[i, j] - self.bias[i, seen].mean()
        # A bias depends on the offset alone: it stays when the contents change places.
        return {name: _bordered(table, float(bias if name == "raw" else relative)) for name, table in tables.items()}

    def _swapped(self, i: int, j: int, seen: Tensor) -> Float[Tensor, "sources sources"]:
        """The relative table with the contents of i and j exchanged, at their offset and norms."""
        query_token = self.values[:, :, i : i + 1].expand_as(self.values)
        queries = self._vectors("query", self.values, self._constant, at=i)
        keys = self._vectors("key", query_token, self._constant)
        mean = keys[:, seen].flatten(1) @ queries[:, seen].flatten(1).mT / int(seen.sum())
        return keys[:, j] @ queries[:, j].mT - mean

    def shares(self) -> Float[Tensor, "sources sources"]:
        """Shares of the variance of the scores over all visible pairs: cov(entry, score)/var(score); they sum to 1."""
        deviation = self._deviation()
        table = self.queries.flatten(1) @ torch.einsum("ij,bjr->bir", deviation, self.keys).flatten(1).mT
        return table if self.bias is None else _bordered(table, float((deviation * self.bias).sum()))

    def _deviation(self) -> Float64[Tensor, "n n"]:
        """The scores relative to their mean over the visible keys, over their sum of squares."""
        deviation = centred(self.scores, self.visible)
        return deviation / deviation.square().sum().clamp(min=torch.finfo(deviation.dtype).tiny)

    def pulled(self, side: str, vectors: Float[Tensor, "n r"]) -> Float[Tensor, "1 n d"]:
        """Vectors u on the queries or keys of all tokens, pulled back to the layer's input: u·Kx = Kᵀu·x."""
        widths = [kernel.key.weight.shape[-2] for kernel in self.kernels]
        parts = zip(self.kernels, vectors[None, None].to(self.values).split(widths, -1), strict=True)
        back = [(kernel.from_queries if side == "query" else kernel.from_keys)(part)[0] for kernel, part in parts]
        return torch.stack(back).sum(0)

    def without(self, write: Float[Tensor, "1 n d"], side: str, constant: float = 0.0) -> Float[Tensor, "n n"]:
        """The scores with a write taken out of the queries alone, or out of the keys; `constant`: with biases."""
        sums = {"query": self.queries.sum(0), "key": self.keys.sum(0)}
        sums[side] = sums[side] - self._vectors(side, write[None], torch.tensor([constant]))[0]
        return self._scores(**sums)

    def weights(self, scores: Float[Tensor, "n n"] | None = None) -> Float[Tensor, "n n"]:
        """The attention weights that these scores give, or others of the same pairs."""
        scores = self.scores if scores is None else scores
        cap = self.layer.softcap
        scores = scores if cap is None else cap * (scores / cap).tanh()
        return scores.masked_fill(~self.visible, -torch.inf).softmax(-1).nan_to_num()

    def null_levels(self, pair: tuple[int, int] | None) -> dict[str, Float[Tensor, " sources"]]:
        """Per side and source: the 95th percentile of the magnitude of its sum, with its tokens in random order.

        Sums are Σ_ij D_ij q_i·k_j: of one pair, D takes the mean over visible keys off that key; of all pairs, D is the
        scores minus their mean over visible keys, over their sum of squares. Positions, norms and biases stay in place.
        """
        seen = self.visible
        if pair is None:
            deviation = self._deviation()
        else:
            deviation = torch.zeros(seen.shape, dtype=torch.float64, device=seen.device)
            deviation[pair[0]] -= seen[pair[0]] / seen[pair[0]].sum()
            deviation[pair] += 1
        generator, n = torch.Generator().manual_seed(0), len(seen)
        orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(ORDERS)]).to(seen.device)
        sides = ((self.queries, deviation @ self.keys.sum(0)), (self.keys, deviation.mT @ self.queries.sum(0)))
        levels = {}
        for side, (vectors, gradient) in zip(("query", "key"), sides, strict=True):
            through, level = self.pulled(side, gradient)[0], []
            for write, whole in zip(self.values, (vectors * gradient).sum((-2, -1)), strict=True):
                products = (through @ write[0].mT).double()  # of places by tokens
                biases = whole - products.trace()  # of queries and keys, in no write
                shuffled = products[torch.arange(n, device=seen.device), orders].sum(-1) + biases
                level.append(shuffled.abs().quantile(LEVEL))
            none = [torch.zeros_like(level[0])] * (self.bias is not None)  # a position bias has no tokens
            levels[side] = torch.stack(level + none)
        return levels

    def ablated(self, source: str, side: str, pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Attention of pairs as it is, without a source on one side, and without a random write of its size instead."""
        if source not in self.names:
            heads = next((name for name in reversed(self.names) if "." in name), self.names[0])
            raise ValueError(f"without must name a source of this head, such as {heads!r}, got {source!r}")
        write = self.values[self.names.index(source)]
        noise = torch.randn(write.shape, generator=torch.Generator().manual_seed(0)).to(write)
        noise = noise * write.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        maps = {
            "weight": self.weights(),
            "without": self.weights(self.without(write, side, float(source == BIAS))),
            "random": self.weights(self.without(noise, side)),
        }
        rows = [{"query": i, "key": j, **{name: float(map_[i, j]) for name, map_ in maps.items()}} for i, j in pairs]
        return {"source": source, "side": side, "pairs": rows}


def _check_features(features: Any, tokens: int, width: int) -> None:
    """Require {name: (direction, activation)} of the right sizes."""
    if not isinstance(features, Mapping) or not features:
        raise ValueError(f"features must map names to (direction, activation), got {features!r:.60}")
    for name, (direction, activation) in features.items():
        check_float(f"features[{name!r}] direction", direction, "d", d=width)
        check_float(f"features[{name!r}] activation", activation, "n", n=tokens)


def largest_pairs(
    scores: Float[Tensor, "batch n n"], visible: Bool[Tensor, "batch n n"], count: int
) -> list[dict[str, Any]]:
    """The visible pairs of tokens with the largest scores relative to the mean over the visible keys."""
    relative = centred(scores, visible).masked_fill(~visible, -torch.inf)
    order = relative.flatten().argsort(descending=True)[: min(count, int(visible.sum()))]
    places = zip(*(index.tolist() for index in torch.unravel_index(order, relative.shape)), strict=True)
    return [{"sequence": b, "query": i, "key": j, "relative": float(relative[b, i, j])} for b, i, j in places]


def _bordered(table: Float[Tensor, "sources sources"], value: float) -> Float[Tensor, "more more"]:
    """A table with one more source on both sides, whose only entry is its own."""
    out = torch.nn.functional.pad(table, (0, 1, 0, 1))
    out[-1, -1] = value
    return out
