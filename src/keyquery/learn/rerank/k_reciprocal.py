"""KReciprocalReranker: training-free re-ranking by the Jaccard distance of k-reciprocal neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from keyquery.learn.base import check_sizes
from keyquery.learn.inputs.vectors import Asked
from keyquery.learn.rerank.base import dots, in_batches
from keyquery.learn.rerank.graph import CHUNK, GraphReranker, mutual, nearest, sparse
from keyquery.support.checks import check_number

SHARE = 2 / 3  # of a neighbour's k/2-reciprocal set that must be in R for the set to be added
ROUNDING = 1e-6  # of dot products: a query may be an item of the database
PAIRS = 2**18  # dot products per batch


class Graph(NamedTuple):
    """k-nearest-neighbour graph of a database: neighbours (itself first), reciprocity, and sparse rows of weights."""

    near: Int64[Tensor, "n k"]
    least: Float[Tensor, " n"]  # similarity of the k-th neighbour
    half: Bool[Tensor, "n h"]  # which of the first k/2 are k/2-reciprocal
    raw: Tensor  # weights (n, n) before smoothing
    rows: Tensor


@dataclass(eq=False, repr=False)
class KReciprocalReranker(GraphReranker):
    """Training-free re-ranking by k-reciprocal neighbours (Zhong et al. 2017), with the Jaccard distance J.

    Recommended: mAP +.013 to +.036 over the first ranking of 128 on three datasets.

        score = (1 − weight)·(1 − J) + weight·(q·x)

    R(i) is the set of k-reciprocal neighbours of i: those of its k nearest, itself included, that have i among their k
    nearest. The k/2-reciprocal set of every j in R(i) is added if two thirds of it are in R(i). Row i has weights
    ∝ exp(x_i·x_j − 1) on R(i), normalised to sum 1, and is averaged over its `smoothing` nearest neighbours, itself
    included. With m the sum of the elementwise minima of two rows, J = 1 − m/(2 − m). Neighbours are searched in the
    database only, so that queries do not affect each other. The neighbours of the whole database are computed at every
    call, unless `fit(database)` has kept them.

    Parameters
    ----------
    top, device, verbose
        As in `kq.AffinityReranker`.
    neighbours
        k; all items if the database has fewer. Default: 20.
    smoothing
        Neighbours that rows are averaged over; at most k. Default: 6.
    weight
        Weight of the dot product, from 0 to 1. Default: 0.3.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> database = torch.randn(60, 8)
    >>> kq.KReciprocalReranker(top=10, neighbours=6).rerank(database[:2], database)[0][:, 0]
    tensor([0, 1])
    """

    _of_graph: ClassVar[tuple[str, ...]] = ("neighbours", "smoothing")
    _of_query: ClassVar[str] = "neighbours"

    top: int | None = None
    neighbours: int = 20
    smoothing: int = 6
    weight: float = 0.3
    device: str | torch.device = "auto"
    verbose: bool = False

    def _check(self) -> None:
        super()._check()
        check_sizes(self, ("neighbours", "smoothing"))
        check_number("weight", self.weight)
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be from 0 to 1, got {self.weight}")
        if self.smoothing > self.neighbours:
            raise ValueError(f"smoothing must be at most neighbours, {self.neighbours}, got {self.smoothing}")

    def _graph(self, database: Float[Tensor, "n dim"]) -> Graph:
        """Neighbour graph of a database of unit vectors (n, dim); it is independent of the queries."""
        k = min(self.neighbours, len(database))
        near = nearest(database, k, self.verbose)
        half = mutual(near[:, : max(round(k / 2), 1)])
        raw = _weights(database, database, near, mutual(near), near, half)
        least = (database * database[near[:, -1]]).sum(1)
        return Graph(near, least, half, raw, _mean(raw, near[:, : self.smoothing]))

    def _scores(self, asked: Asked, lists: Int64[Tensor, "q m"], top: int) -> Float[Tensor, "q top"]:
        """Scores of the first `top`; the query's neighbours are the first k of the lists."""
        graph = self._kept_graph(asked.database)
        near, lists = lists[:, : self.neighbours], lists[:, :top]
        smoothing = min(self.smoothing, near.shape[1])
        similar = dots(asked, near, torch.arange(len(near), device=near.device))
        both = similar >= graph.least[near] - ROUNDING
        rows = _weights(asked.queries, asked.database, near, both, graph.near, graph.half) / smoothing
        if smoothing > 1:
            rows = rows + _mean(graph.raw, near[:, : smoothing - 1]) * ((smoothing - 1) / smoothing)
        scores = []
        for chosen in in_batches(asked, lists, self.verbose):
            shared = _shared(rows.index_select(0, chosen).to_dense(), graph.rows, lists[chosen])
            scores.append((1 - self.weight) * shared / (2 - shared) + self.weight * dots(asked, lists, chosen))
        return torch.cat(scores)


def _weights(
    vectors: Float[Tensor, "m dim"],
    database: Float[Tensor, "n dim"],
    near: Int64[Tensor, "m k"],
    both: Bool[Tensor, "m k"],
    graph: Int64[Tensor, "n _"],
    half: Bool[Tensor, "n h"],
) -> Tensor:
    """Sparse rows (m, n): exp(x_i·x_j − 1) over the expanded reciprocal sets, normalised to sum 1."""
    pairs = []
    for chunk in torch.arange(len(near), device=near.device).split(CHUNK):
        known, member = near[chunk], both[chunk]
        theirs, reciprocal = graph[known, : half.shape[1]], half[known]  # neighbours of neighbours, (chunk, k, h)
        met = (theirs.unsqueeze(-1) == known.masked_fill(~member, -1)[:, None, None]).any(-1) & reciprocal
        added = member & (met.sum(-1) >= SHARE * reciprocal.sum(-1)) & reciprocal.any(-1)
        brought = reciprocal & added.unsqueeze(-1)
        pairs.append(torch.stack((chunk[member.nonzero()[:, 0]], known[member])))
        pairs.append(torch.stack((chunk[brought.nonzero()[:, 0]], theirs[brought])))
    rows, columns = torch.cat(pairs, 1)
    once = (rows * len(database) + columns).unique()
    rows, columns = once // len(database), once % len(database)
    batches = zip(rows.split(PAIRS), columns.split(PAIRS), strict=True)
    values = torch.cat([((vectors[i] * database[j]).sum(1) - 1).exp() for i, j in batches])
    values = values / values.new_zeros(len(near)).index_add_(0, rows, values)[rows]
    return sparse(rows, columns, values, (len(near), len(database)))


def _mean(rows: Tensor, near: Int64[Tensor, "m s"]) -> Tensor:
    """The mean of each item's neighbours' sparse rows."""
    chosen = rows.index_select(0, near.flatten())
    row, column = chosen._indices()
    return sparse(row // near.shape[1], column, chosen._values() / near.shape[1], (len(near), rows.shape[1]))


def _shared(queries: Float[Tensor, "some n"], items: Tensor, lists: Int64[Tensor, "some top"]) -> Tensor:
    """Σ_j of the minimum of a query's row and of each candidate's sparse row."""
    rows = items.index_select(0, lists.flatten()).coalesce()
    candidate, columns = rows.indices()
    least = torch.minimum(queries[candidate // lists.shape[1], columns], rows.values())
    return least.new_zeros(lists.numel()).index_add_(0, candidate, least).view(lists.shape)
