"""KReciprocalReranker: training-free re-ranking by the Jaccard distance of k-reciprocal neighbours."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from keyquery.learn.base import check_sizes
from keyquery.learn.inputs.vectors import Asked, vectors_of
from keyquery.learn.rerank.base import ListReranker, by_score, dots, in_batches
from keyquery.learn.rerank.search import CHUNK, itself_first, mutual, search
from keyquery.support.checks import check_number
from keyquery.support.devices import pick_device

SHARE = 2 / 3  # of a neighbour's k/2-reciprocal set that must be in R for the set to be added
ROUNDING = 1e-6  # of dot products: a query may be an item of the database
PAIRS = 2**18  # dot products per batch


class Sparse(NamedTuple):
    """Sparse (CSR) rows that sum to 1: row i has `values[starts[i]:starts[i + 1]]` in those `columns`."""

    starts: Int64[Tensor, " ends"]
    columns: Int64[Tensor, " entries"]
    values: Float[Tensor, " entries"]

    def entries(
        self, chosen: Int64[Tensor, " m"]
    ) -> tuple[Int64[Tensor, " some"], Int64[Tensor, " some"], Float[Tensor, " some"]]:
        """Entries of the chosen rows: position of the row in `chosen`, column and value."""
        sizes = self.starts[chosen + 1] - self.starts[chosen]
        of = torch.arange(len(chosen), device=chosen.device).repeat_interleave(sizes)
        within = torch.arange(len(of), device=chosen.device) - (sizes.cumsum(0) - sizes)[of]
        place = self.starts[chosen][of] + within
        return of, self.columns[place], self.values[place]


class Graph(NamedTuple):
    """k-nearest-neighbour graph of a database: neighbours (itself first), reciprocity, and rows of weights."""

    near: Int64[Tensor, "n k"]
    least: Float[Tensor, " n"]  # similarity of the k-th neighbour
    half: Bool[Tensor, "n h"]  # which of the first k/2 are k/2-reciprocal
    raw: Sparse  # weights before smoothing
    rows: Sparse


class Kept(NamedTuple):
    """The graph of a fitted database, and what it was computed from."""

    vectors: Float[Tensor, "n dim"]
    params: tuple[int, int]
    graph: Graph

    def holds(self, vectors: Float[Tensor, "n dim"], params: tuple[int, int]) -> bool:
        """Whether the graph is that of these vectors and parameters."""
        same = self.vectors.device == vectors.device and self.params == params
        return same and torch.equal(self.vectors, vectors)


class KReciprocalReranker(ListReranker):
    """Training-free re-ranking by k-reciprocal neighbours (Zhong et al. 2017), with the Jaccard distance J.

    Recommended: mAP +.013 to +.036 over the first ranking of 128 on three datasets.

        score = (1 − weight)·(1 − J) + weight·(q·x)

    R(i) is the set of k-reciprocal neighbours of i: those of its k nearest, itself included, that have i among their k
    nearest. The k/2-reciprocal set of every j in R(i) is added if two thirds of it are in R(i). Row i has weights
    ∝ exp(x_i·x_j − 1) on R(i), normalised to sum 1, and is averaged over its `smoothing` nearest neighbours, itself
    included. With m the sum of the elementwise minima of two rows, J = 1 − m/(2 − m). Neighbours are searched in the
    database only, so that queries do not affect each other.

    Parameters
    ----------
    top
        Candidates per query that are re-ranked. Default: 1024, or all if there are fewer.
    neighbours
        k; all items if the database has fewer. Default: 20.
    smoothing
        Neighbours that rows are averaged over; at most k. Default: 6.
    weight
        Weight of the dot product, from 0 to 1. Default: 0.3.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere lines. Default: False.

    Notes
    -----
    The graph of the neighbours of the whole database is computed at every call, unless `fit(database)` has kept it.

    See Also
    --------
    AlphaQueryExpansion, AffinityReranker : other training-free re-rankers.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> database = torch.randn(60, 8)
    >>> kq.KReciprocalReranker(top=10, neighbours=6).rerank(database[:2], database)[0][:, 0]
    tensor([0, 1])
    """

    def __init__(
        self,
        top: int | None = None,
        neighbours: int = 20,
        smoothing: int = 6,
        weight: float = 0.3,
        device: str | torch.device = "auto",
        verbose: bool = False,
    ) -> None:
        self.top, self.neighbours, self.smoothing = top, neighbours, smoothing
        self.weight, self.device, self.verbose = weight, device, verbose

    def _check(self) -> None:
        super()._check()
        check_sizes(self, ("neighbours", "smoothing"))
        check_number("weight", self.weight)
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be from 0 to 1, got {self.weight}")
        if self.smoothing > self.neighbours:
            raise ValueError(f"smoothing must be at most neighbours, {self.neighbours}, got {self.smoothing}")

    def fit(self, features: Any = None, labels: Any = None) -> KReciprocalReranker:
        """Keep a database of vectors (n, dim), if given, and its neighbour graph, so that queries are fast.

        Parameters
        ----------
        features
            Vectors (n, dim) of the database. Default: none.
        labels
            Ignored; for scikit-learn.

        Returns
        -------
        KReciprocalReranker
            The estimator.
        """
        super().fit(features, labels)
        self.graph_: Kept | None = None
        if features is not None:
            vectors = vectors_of("features", features, pick_device(self.device))
            self.graph_ = Kept(vectors, (self.neighbours, self.smoothing), self.graph(vectors))
        return self

    def _reranked(self, asked: Asked, top: int, index: Any) -> tuple[Int64[Tensor, "q top"], Float[Tensor, "q top"]]:
        most = max(top, min(self.neighbours, len(asked.database)))  # neighbours count beyond the candidates, too
        order, scores = self._ordered(asked, self._first(asked, most, index), top)
        return order[:, :top], scores

    def _ordered(
        self, asked: Asked, lists: Int64[Tensor, "q m"], top: int
    ) -> tuple[Int64[Tensor, "q m"], Float[Tensor, "q top"]]:
        return by_score(lists, self._scores(asked, lists[:, :top], lists))

    def _scores(
        self, asked: Asked, lists: Int64[Tensor, "q top"], near: Int64[Tensor, "q m"] | None = None
    ) -> Float[Tensor, "q top"]:
        kept: Kept | None = getattr(self, "graph_", None)
        holds = kept is not None and kept.holds(asked.database, (self.neighbours, self.smoothing))
        graph = kept.graph if kept is not None and holds else self.graph(asked.database)
        return self.by_graph(asked, lists, graph, near)

    def graph(self, database: Float[Tensor, "n dim"]) -> Graph:
        """Neighbour graph of a database of unit vectors; it is independent of the queries.

        Parameters
        ----------
        database
            Unit vectors (n, dim).

        Returns
        -------
        Graph
            Neighbours and their weights.
        """
        k = min(self.neighbours, len(database))
        smoothing = min(self.smoothing, k)
        near = itself_first(search(database, database, k, verbose=self.verbose))
        whole, half = (mutual(near[:, :size]) for size in (k, _half(k)))
        raw = _weights(database, database, near, whole, near, half)
        least = (database * database[near[:, -1]]).sum(1)
        return Graph(near, least, half, raw, _smoothed(raw, near[:, :smoothing], smoothing, len(database)))

    def by_graph(
        self, asked: Asked, lists: Int64[Tensor, "q top"], graph: Graph, near: Int64[Tensor, "q m"] | None = None
    ) -> Float[Tensor, "q top"]:
        """Scores of the candidates, given the graph of the database.

        Parameters
        ----------
        asked
            The queries.
        lists
            Indices of their candidates (q, top).
        graph
            Of the database, as made by `graph`.
        near
            The nearest neighbours of the queries (q, m), of which the first k count. Default: the candidates.

        Returns
        -------
        Tensor
            Scores (q, top).
        """
        near = (lists if near is None else near)[:, : self.neighbours]
        smoothing = min(self.smoothing, near.shape[1])
        similar = dots(asked, near, torch.arange(len(near), device=near.device))
        both = similar >= graph.least[near] - ROUNDING
        own = _weights(asked.queries, asked.database, near, both, graph.near, graph.half)
        smooth = _smoothed(graph.raw, near[:, : smoothing - 1], smoothing, len(asked.database), own)
        scores = []
        for chosen in in_batches(asked, lists, self.verbose):
            shared = _shared(smooth, graph.rows, chosen, lists[chosen], len(asked.database))
            scores.append((1 - self.weight) * shared / (2 - shared) + self.weight * dots(asked, lists, chosen))
        return torch.cat(scores)


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
    """Rows (m, n): exp(x_i·x_j − 1) over the expanded reciprocal sets, normalised to sum 1."""
    pairs = []
    for chunk in torch.arange(len(near), device=near.device).split(CHUNK):
        known, own = near[chunk], both[chunk]
        theirs, reciprocal = graph[known, : half.shape[1]], half[known]  # neighbours of neighbours, (chunk, k, h)
        met = (theirs.unsqueeze(-1) == known.masked_fill(~own, -1)[:, None, None]).any(-1) & reciprocal
        added = own & (met.sum(-1) >= SHARE * reciprocal.sum(-1)) & reciprocal.any(-1)
        brought = reciprocal & added.unsqueeze(-1)
        pairs.append(torch.stack((chunk[own.nonzero()[:, 0]], known[own])))
        pairs.append(torch.stack((chunk[brought.nonzero()[:, 0]], theirs[brought])))
    rows, columns = torch.cat(pairs, 1)
    once = (rows * len(database) + columns).unique()
    rows, columns = once // len(database), once % len(database)
    each = zip(rows.split(PAIRS), columns.split(PAIRS), strict=True)
    values = torch.cat([((vectors[i] * database[j]).sum(1) - 1).exp() for i, j in each])
    sums = values.new_zeros(len(near)).index_add_(0, rows, values)
    return _sparse(once, values / sums[rows], len(near), len(database))


def _smoothed(rows: Sparse, near: Int64[Tensor, "m s"], size: int, items: int, own: Sparse | None = None) -> Sparse:
    """The sum of each item's neighbours' rows, and of `own` if not None, divided by `size`."""
    of, columns, values = rows.entries(near.flatten())
    keys = of // near.shape[1] * items + columns if near.shape[1] else columns
    if own is not None:
        at, own_columns, mine = own.entries(torch.arange(len(near), device=near.device))
        keys, values = torch.cat((keys, at * items + own_columns)), torch.cat((values, mine))
    once, place = keys.unique(return_inverse=True)
    sums = values.new_zeros(len(once)).index_add_(0, place, values / size)
    return _sparse(once, sums, len(near), items)


def _sparse(keys: Int64[Tensor, " entries"], values: Float[Tensor, " entries"], count: int, items: int) -> Sparse:
    """Sparse rows from sorted keys row·items + column."""
    ends = torch.bincount(keys // items, minlength=count).cumsum(0)
    return Sparse(torch.cat((ends.new_zeros(1), ends)), keys % items, values)


def _shared(
    queries: Sparse, items: Sparse, chosen: Int64[Tensor, " some"], lists: Int64[Tensor, "some top"], count: int
) -> Float[Tensor, "some top"]:
    """Σ_j of the minimum of a query's row and of each candidate's row."""
    at, columns, own = queries.entries(chosen)
    dense = own.new_zeros(len(chosen), count)
    dense[at, columns] = own
    candidate, columns, values = items.entries(lists.flatten())
    least = torch.minimum(dense[candidate // lists.shape[1], columns], values)
    return least.new_zeros(lists.numel()).index_add_(0, candidate, least).view(lists.shape)
