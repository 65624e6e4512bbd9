"""KReciprocalReranker: items are alike whose neighbours, of those that are neighbours both ways, are the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from keyquery.estimators.base import check_sizes
from keyquery.estimators.inputs.vectors import Asked
from keyquery.estimators.rerank.base import ListReranker, dots, in_batches
from keyquery.estimators.rerank.search import CHUNK, itself_first, mutual, search
from keyquery.support.checks import check_number

SHARE = 2 / 3  # of a neighbour's own neighbours that must be known for the rest to be taken in
ROUNDING = 1e-6  # of dot products: a query may be an item of the database
PAIRS = 2**18  # of vectors whose dot products are taken at a time


class Sparse(NamedTuple):
    """Rows of weights that sum to 1: row i has `values[starts[i]:starts[i + 1]]` in those `columns`."""

    starts: Int64[Tensor, " ends"]
    columns: Int64[Tensor, " entries"]
    values: Float[Tensor, " entries"]

    def entries(
        self, chosen: Int64[Tensor, " m"]
    ) -> tuple[Int64[Tensor, " some"], Int64[Tensor, " some"], Float[Tensor, " some"]]:
        """Of chosen rows: which of them each entry is of, its column and its value."""
        sizes = self.starts[chosen + 1] - self.starts[chosen]
        of = torch.arange(len(chosen), device=chosen.device).repeat_interleave(sizes)
        within = torch.arange(len(of), device=chosen.device) - (sizes.cumsum(0) - sizes)[of]
        place = self.starts[chosen][of] + within
        return of, self.columns[place], self.values[place]


class Graph(NamedTuple):
    """A database's neighbours: each item's k nearest, itself first, which of them are mutual, and rows of weights."""

    near: Int64[Tensor, "n k"]
    least: Float[Tensor, " n"]  # the similarity of the k-th
    half: Bool[Tensor, "n h"]  # which of the first k/2 are mutual among as many
    raw: Sparse  # weights before smoothing
    rows: Sparse


class KReciprocalReranker(ListReranker):
    """Neighbours both ways (Zhong et al. 2017): lists by (1 − `weight`)·(1 − J) + `weight`·(q·x), J Jaccard's distance.

    R(i) are those of the k = `neighbours` nearest of i, itself among them, that have i among their k nearest. It takes
    in R(j) of k/2 for every j of its own whose R(j) it knows two thirds of. Row i has weights exp(x_i·x_j − 1) there,
    which sum to 1, and becomes the mean of the rows of its `smoothing` nearest, itself among them. Of two rows, m, the
    sum of the lesser entries, gives J = 1 − m/(2 − m). Neighbours are of the database; a query has its own there, and
    no query sees another.

    >>> _ = torch.manual_seed(0)
    >>> database = torch.randn(60, 8)
    >>> kq.KReciprocalReranker(top=10, neighbours=6).rerank(database[:2], database)[0][:, 0]
    tensor([0, 1])
    """

    def __init__(
        self,
        top: int = 1024,
        neighbours: int = 20,
        smoothing: int = 6,
        weight: float = 0.3,
        device: str | torch.device = "auto",
    ) -> None:
        self.top, self.neighbours, self.smoothing = top, neighbours, smoothing
        self.weight, self.device = weight, device

    def _check(self) -> None:
        check_sizes(self, ("top", "neighbours", "smoothing"))
        check_number("weight", self.weight)
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be from 0 to 1, got {self.weight}")
        if self.smoothing > self.neighbours:
            raise ValueError(f"smoothing must be at most neighbours, {self.neighbours}, got {self.smoothing}")

    def _scores(self, asked: Asked, lists: Int64[Tensor, "q top"]) -> Float[Tensor, "q top"]:
        return self.by_graph(asked, lists, self.graph(asked.database))

    def graph(self, database: Float[Tensor, "n dim"]) -> Graph:
        """Neighbours of a database whose vectors have length 1; it is the same for all queries."""
        k = self.neighbours
        if k > len(database):
            raise ValueError(f"neighbours is {k}, but the database has only {len(database)} items")
        near = itself_first(search(database, database, k))
        whole, half = (mutual(near[:, :size]) for size in (k, _half(k)))
        raw = _weights(database, database, near, whole, near, half)
        least = (database * database[near[:, -1]]).sum(1)
        return Graph(near, least, half, raw, _smoothed(raw, near[:, : self.smoothing], self.smoothing, len(database)))

    def by_graph(self, asked: Asked, lists: Int64[Tensor, "q top"], graph: Graph) -> Float[Tensor, "q top"]:
        """Scores of candidates, where the database's graph is known."""
        k = self.neighbours
        if lists.shape[1] < k:
            raise ValueError(f"neighbours is {k}, but lists hold only {lists.shape[1]} items")
        near = lists[:, :k]
        similar = dots(asked, near, torch.arange(len(near), device=near.device))
        both = similar >= graph.least[near] - ROUNDING
        own = _weights(asked.queries, asked.database, near, both, graph.near, graph.half)
        smooth = _smoothed(graph.raw, near[:, : self.smoothing - 1], self.smoothing, len(asked.database), own)
        found = []
        for some in in_batches(asked, lists):
            shared = _shared(smooth, graph.rows, some, lists[some], len(asked.database))
            found.append((1 - self.weight) * shared / (2 - shared) + self.weight * dots(asked, lists, some))
        return torch.cat(found)


def _half(k: int) -> int:
    return max(round(k / 2), 1)


def _weights(
    vectors: Float[Tensor, "m dim"],
    database: Float[Tensor, "n dim"],
    near: Int64[Tensor, "m k"],
    both: Bool[Tensor, "m k"],
    graph: Int64[Tensor, "n _"],
    half: Bool[Tensor, "n h"],
) -> Sparse:
    """Rows (m, n): exp(x_i·x_j − 1) over mutual neighbours and what they bring, divided by its sum."""
    pairs = []
    for some in torch.arange(len(near), device=near.device).split(CHUNK):
        known, own = near[some], both[some]
        theirs, there = graph[known, : half.shape[1]], half[known]  # of each neighbour, its own (some, k, h)
        met = (theirs.unsqueeze(-1) == known.masked_fill(~own, -1)[:, None, None]).any(-1) & there
        taken = own & (met.sum(-1) >= SHARE * there.sum(-1)) & there.any(-1)
        brought = there & taken.unsqueeze(-1)
        pairs.append(torch.stack((some[own.nonzero()[:, 0]], known[own])))
        pairs.append(torch.stack((some[brought.nonzero()[:, 0]], theirs[brought])))
    rows, columns = torch.cat(pairs, 1)
    once = (rows * len(database) + columns).unique()
    rows, columns = once // len(database), once % len(database)
    each = zip(rows.split(PAIRS), columns.split(PAIRS), strict=True)
    values = torch.cat([((vectors[i] * database[j]).sum(1) - 1).exp() for i, j in each])
    sums = values.new_zeros(len(near)).index_add_(0, rows, values)
    return _sparse(once, values / sums[rows], len(near), len(database))


def _smoothed(rows: Sparse, near: Int64[Tensor, "m s"], size: int, items: int, own: Sparse | None = None) -> Sparse:
    """For each of m the sum of its neighbours' rows, and of its own where given, divided by `size`."""
    of, columns, values = rows.entries(near.flatten())
    keys = of // near.shape[1] * items + columns if near.shape[1] else columns
    if own is not None:
        at, there, mine = own.entries(torch.arange(len(near), device=near.device))
        keys, values = torch.cat((keys, at * items + there)), torch.cat((values, mine))
    once, place = keys.unique(return_inverse=True)
    sums = values.new_zeros(len(once)).index_add_(0, place, values / size)
    return _sparse(once, sums, len(near), items)


def _sparse(keys: Int64[Tensor, " entries"], values: Float[Tensor, " entries"], count: int, items: int) -> Sparse:
    """Rows out of keys row·items + column, in order."""
    ends = torch.bincount(keys // items, minlength=count).cumsum(0)
    return Sparse(torch.cat((ends.new_zeros(1), ends)), keys % items, values)


def _shared(
    queries: Sparse, items: Sparse, some: Int64[Tensor, " some"], lists: Int64[Tensor, "some top"], count: int
) -> Float[Tensor, "some top"]:
    """Σ_j min of the entries of a query's row and of each candidate's."""
    at, columns, own = queries.entries(some)
    dense = own.new_zeros(len(some), count)
    dense[at, columns] = own
    candidate, columns, values = items.entries(lists.flatten())
    least = torch.minimum(dense[candidate // lists.shape[1], columns], values)
    return least.new_zeros(lists.numel()).index_add_(0, candidate, least).view(lists.shape)
