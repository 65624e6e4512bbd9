"""Shares of the variance of every head's scores by source, streamed over sequences.

For the key side, with s′ the scores minus their mean over the visible keys of each query,

    Σ_ij s′_ij (q_i · k_b(j)) = Σ_j u_j · w_b(j),     u_j = Kᵀ Σ_i s′_ij q_i,

so that one vector u per head and token, pulled back to the residual stream, serves all sources: no pair of tokens is
looked at once per source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import methodcaller

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.instruments.attribution.table import POSITION
from keyquery.listening.residual.kernels import Kernel, centred, position_bias
from keyquery.listening.residual.recording import Recording
from keyquery.listening.residual.terms import BIAS, HeadWrites, Write, pulled

Writer = Write | HeadWrites
PartsOf = Callable[[Writer], dict[str, Tensor]]
WHOLE = 1e-3  # relative error up to which the shares of all sources sum to 1


@dataclass(eq=False)
class Sums:
    """Sums over sequences of the products x of each source with the scores, and of the scores' squares y."""

    sources: list[str]
    moments: list[Tensor]  # x, x² and xy (2, sources, side_heads), of sources and of shuffled ones; y and y²
    sequences: int

    def shares(self) -> tuple[Tensor, Tensor]:
        """Σx/Σy of sources and shuffled sources, (2, sources, query and key heads), with standard errors."""
        x, xx, xy, y, yy = self.moments
        m, total = self.sequences, y.clamp(min=1e-300)
        share = x / total
        squares = (xx - 2 * share * xy + share.square() * yy).clamp(min=0)
        return share, (squares * m / max(m - 1, 1)).sqrt() / total


@dataclass(eq=False)
class WiringSums:
    """The sums of all layers, by the label of their attention module."""

    generator: torch.Generator
    layers: dict[str, Sums] = field(default_factory=dict)

    def add(self, record: Recording, heads: Heads, groups: Mapping[str, Sequence[Layer]]) -> None:
        """Add the sequences of one run."""
        parts_of: PartsOf = cache(methodcaller("parts"))  # computed once in a run
        for label, layers in groups.items():
            names, x, y = self._layer(record, heads, layers, parts_of)
            moments = [x.sum(2), x.square().sum(2), (x * y).sum(2), y.sum(0), y.square().sum(0)]
            earlier = self.layers.setdefault(label, Sums(names, [torch.zeros_like(t) for t in moments], 0))
            if earlier.sources != names:
                raise ValueError(f"layer {label}: the sources differ from batch to batch")
            sums = [before + new for before, new in zip(earlier.moments, moments, strict=True)]
            self.layers[label] = Sums(names, sums, earlier.sequences + len(y))

    def _layer(
        self, record: Recording, heads: Heads, layers: Sequence[Layer], parts_of: PartsOf
    ) -> tuple[list[str], Float64[Tensor, "2 sources batch side_heads"], Float64[Tensor, "batch side_heads"]]:
        first = layers[0]
        entered, pairs = record.of(first), record.pairs[first.index]
        kernels = [Kernel.of(layer, entered.tokens.float(), record.pairs[layer.index]) for layer in layers]
        queries, keys = zip(*(kernel.rotated(record.pairs[kernel.layer.index]) for kernel in kernels), strict=True)
        bias = position_bias(heads, first, pairs.positions)
        scores = sum((q @ k.mT for q, k in zip(queries, keys, strict=True)), torch.zeros(()))
        scores = centred(scores if bias is None else scores + bias.float(), pairs.visible)
        y = scores.square().sum((-2, -1)).double().repeat(1, 2)
        u, constants = torch.zeros(()), torch.zeros(())  # of the queries of all heads, then of their keys
        for kernel, query, key in zip(kernels, queries, keys, strict=True):
            to_query, to_key = scores @ key, scores.mT @ query
            u = u + torch.cat((kernel.from_queries(to_query), kernel.from_keys(to_key)), 1)
            constants = constants + _constants(kernel, to_query, to_key)
        assert entered.term is not None
        leaves = pulled(entered.term, u.transpose(0, 1).contiguous())
        products = self._products(leaves, pairs.real, parts_of)
        products[BIAS] = products.get(BIAS, 0) + torch.stack((constants, constants))
        if bias is not None:
            by_bias = (scores * bias).sum((-2, -1)).double().repeat(1, 2)
            products[POSITION] = torch.stack((by_bias, torch.zeros_like(by_bias)))
        x, y = torch.stack(list(products.values()), 1).cpu(), y.cpu()
        if not ((x[0].sum(0) - y).abs() <= WHOLE * y.amax()).all():
            raise ValueError(f"{first.name}: the writes found do not add up to its scores")
        return list(products), x, y

    def _products(
        self, leaves: Iterable[tuple[Writer, Tensor]], real: Bool[Tensor, "batch n"], parts_of: PartsOf
    ) -> dict[str, Float64[Tensor, "2 batch side_heads"]]:
        """Products with each source, and with the real tokens of its writes in random order, by its name."""
        groups: dict[int, list[tuple[Writer, Tensor]]] = {}
        for write, u in leaves:  # writes into the same stream share their vectors
            groups.setdefault(id(u), []).append((write, u))
        orders = [_order(row, self.generator) for row in real]
        products: dict[str, Tensor] = {}
        for group in groups.values():
            u = group[0][1].unflatten(1, real.shape) if group[0][1].ndim == 3 else group[0][1]
            shuffled = torch.stack([u[:, row].index_select(1, order) for row, order in enumerate(orders)], 1)
            both = torch.cat((u, shuffled)).flatten(2)
            parts = [part for write, _ in group for part in parts_of(write).items()]
            values = torch.stack([_as(value, u.shape[1:]).flatten(1) for _, value in parts])
            sums = [values[:, row] @ both[:, row].mT for row in range(len(real))]  # Σ_j u_j·w(j), per sequence
            by_source = torch.stack(sums, 1).double().unflatten(-1, (2, -1)).movedim(2, 1)
            for (name, _), value in zip(parts, by_source, strict=True):
                products[name] = products[name] + value if name in products else value
        return products


def _as(value: Tensor, shape: torch.Size) -> Tensor:
    """The values of a write, whose tokens may be flattened, as (batch, n, d)."""
    return value.reshape(shape) if value.numel() == shape.numel() else value.broadcast_to(shape)


def _order(real: Bool[Tensor, " n"], generator: torch.Generator) -> Int[Tensor, " n"]:
    """A random order of the real tokens; padding stays."""
    order, places = torch.arange(len(real), device=real.device), real.nonzero().flatten()
    order[places] = places[torch.randperm(len(places), generator=generator).to(real.device)]
    return order


def _constants(
    kernel: Kernel, to_query: Float[Tensor, "batch heads n r"], to_key: Float[Tensor, "batch heads n r"]
) -> Float64[Tensor, "batch side_heads"]:
    """The products of the biases of queries and keys, which are in no write."""
    nothing = to_query.new_zeros(1, len(to_query), to_query.shape[-2], kernel.query.weight.shape[-1])
    query, key = (vectors(nothing, torch.ones(1))[0] for vectors in (kernel.queries, kernel.keys))
    return torch.cat(((query * to_query).sum((-2, -1)), (key * to_key).sum((-2, -1))), 1).double()
