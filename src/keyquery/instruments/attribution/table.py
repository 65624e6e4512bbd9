"""The score of one head as a table: query-side source by key-side source, which sums to the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from keyquery.listening.residual.kernels import Kernel, centred
from keyquery.listening.residual.terms import BIAS

POSITION = "position bias"  # the source of ALiBi and T5's bias, which belongs to pairs of tokens


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Queries and keys of one head by source, on one sequence; kernels that belong to one head are added."""

    names: list[str]
    values: Float[Tensor, "sources 1 n d"]  # what each source adds to the layer's input
    constant: Float[Tensor, " sources"]
    kernels: Sequence[Kernel]
    visible: Bool[Tensor, "n n"]
    bias: Float[Tensor, "n n"] | None = None  # of positions

    @classmethod
    def of(
        cls,
        sources: Mapping[str, Float[Tensor, "1 n d"]],
        kernels: Sequence[Kernel],
        visible: Bool[Tensor, "n n"],
        bias: Float[Tensor, "n n"] | None = None,
    ) -> HeadScores:
        """From the contribution of each source to the layer's input; biases of queries and keys are one more."""
        if BIAS not in sources:
            sources = {**sources, BIAS: torch.zeros_like(next(iter(sources.values())))}
        names = list(sources)
        constant = torch.tensor([float(name == BIAS) for name in names])
        return cls(names, torch.stack(list(sources.values())), constant, kernels, visible, bias)

    @property
    def sources(self) -> list[str]:
        """Names of the rows and columns of tables."""
        return self.names if self.bias is None else [*self.names, POSITION]

    def queries(self) -> Float[Tensor, "sources n r"]:
        """Scaled and rotated queries of each source; kernels are concatenated, in float64 for exact sums."""
        return _joined([kernel.queries(self.values, self.constant) for kernel in self.kernels])

    def keys(self) -> Float[Tensor, "sources n r"]:
        """Rotated keys of each source."""
        return _joined([kernel.keys(self.values, self.constant) for kernel in self.kernels])

    def scores(self) -> Float[Tensor, "n n"]:
        """The scores of all pairs: the sum over sources on both sides."""
        scores = self.queries().sum(0) @ self.keys().sum(0).mT
        return scores if self.bias is None else scores + self.bias

    def pair(self, i: int, j: int) -> dict[str, Float[Tensor, "sources sources"]]:
        """The table of query i and key j: "raw", its symmetric part, and both relative to the mean visible key."""
        seen = self.visible[i]
        query, keys = self.queries()[:, i], self.keys()
        raw, mean = query @ keys[:, j].mT, query @ keys[:, seen].mean(1).mT
        swapped, swapped_mean = self._swapped(i, j, seen)
        tables = {
            "raw": raw,
            "relative": raw - mean,
            "raw_symmetric": (raw + swapped) / 2,
            "symmetric": (raw - mean + swapped - swapped_mean) / 2,
        }
        if self.bias is None:
            return tables
        bias = float(self.bias[i, j]), float(self.bias[i, j] - self.bias[i, seen].mean())
        # A bias depends on the offset alone: it stays when the contents change places.
        return {name: _bordered(table, bias["raw" not in name]) for name, table in tables.items()}

    def _swapped(self, i: int, j: int, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The table with the contents of i and j exchanged, at their offset and norms; and its mean over keys."""
        n = self.values.shape[2]
        query_token = self.values[:, :, i : i + 1].expand(-1, -1, n, -1)
        queries = _joined([kernel.queries(self.values, self.constant, at=i) for kernel in self.kernels])
        keys = _joined([kernel.keys(query_token, self.constant) for kernel in self.kernels])
        mean = keys[:, seen].flatten(1) @ queries[:, seen].flatten(1).mT / int(seen.sum())
        return keys[:, j] @ queries[:, j].mT, mean

    def shares(self) -> Float[Tensor, "sources sources"]:
        """Shares of the variance of the scores over all visible pairs: cov(entry, score)/var(score); they sum to 1."""
        deviation = centred(self.scores(), self.visible)
        total = deviation.square().sum()
        query, keys = self.queries(), self.keys()
        pulled = torch.einsum("ij,bjr->bir", deviation, keys)
        table = query.flatten(1) @ pulled.flatten(1).mT
        if self.bias is not None:
            table = _bordered(table, float((deviation * self.bias).sum()))
        return table / total.clamp(min=torch.finfo(total.dtype).tiny)

    def pulled(self, side: str, vectors: Float[Tensor, "n r"]) -> Float[Tensor, "1 n d"]:
        """Vectors u on the queries or keys of all tokens, pulled back to the layer's input: u·Kx = Kᵀu·x."""
        out, used = torch.zeros_like(self.values[0]), 0
        for kernel in self.kernels:
            width = kernel.key.weight.shape[-2]
            own = vectors[None, None, :, used : used + width].to(out)
            out = out + (kernel.from_queries if side == "query" else kernel.from_keys)(own)[0]
            used += width
        return out

    def without(self, write: Float[Tensor, "1 n d"], side: str, constant: float = 0.0) -> Float[Tensor, "n n"]:
        """The scores with a write taken out of the queries alone, or out of the keys; `constant`: with biases."""
        one = torch.tensor([constant])
        query, key = self.queries().sum(0), self.keys().sum(0)
        if side == "query":
            query = query - _joined([kernel.queries(write[None], one) for kernel in self.kernels])[0]
        else:
            key = key - _joined([kernel.keys(write[None], one) for kernel in self.kernels])[0]
        return query @ key.mT if self.bias is None else query @ key.mT + self.bias

    def weights(self, softcap: float | None, scores: Float[Tensor, "n n"] | None = None) -> Float[Tensor, "n n"]:
        """The attention weights that these scores give, or others of the same pairs."""
        scores = self.scores() if scores is None else scores
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        return scores.masked_fill(~self.visible, -torch.inf).softmax(-1).nan_to_num()


def _joined(vectors: list[Tensor]) -> Float64[Tensor, "sources n r"]:
    return torch.cat([each[:, 0, 0] for each in vectors], -1).double()


def _bordered(table: Float[Tensor, "sources sources"], value: float) -> Float[Tensor, "more more"]:
    """A table with one more source on both sides, whose only entry is its own."""
    out = torch.nn.functional.pad(table, (0, 1, 0, 1))
    out[-1, -1] = value
    return out
