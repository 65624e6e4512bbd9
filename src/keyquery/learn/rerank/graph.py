"""What re-rankers on the neighbour graph of a database share: its neighbours, and the graph that `fit` keeps."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from keyquery.learn.inputs.vectors import Asked, vectors_of
from keyquery.learn.rerank.base import ListReranker, search
from keyquery.support.devices import pick_device

CHUNK = 1024  # items per batch


class GraphReranker(ListReranker):
    """A re-ranker by a graph of the database, which is computed at every call unless `fit` has kept it."""

    _of_graph: ClassVar[tuple[str, ...]]  # the parameters that the graph depends on
    _of_query: ClassVar[str]  # the parameter that is the number of a query's neighbours

    def fit(self, features: Any = None, labels: Any = None) -> Self:
        """Keep a database of vectors (n, dim), if given, and its graph, so that queries are fast."""
        super().fit(features, labels)
        self.graph_: tuple[Tensor, list[Any], Any] | None = None
        if features is not None:
            vectors = vectors_of("features", features, pick_device(self.device))
            self.graph_ = vectors, self._graph_params(), self._graph(vectors)
        return self

    @abstractmethod
    def _graph(self, database: Float[Tensor, "n dim"]) -> Any:
        """The graph of a database of unit vectors; it is independent of the queries."""

    def _graph_params(self) -> list[Any]:
        return [getattr(self, name) for name in self._of_graph]

    def _kept_graph(self, database: Float[Tensor, "n dim"]) -> Any:
        kept = getattr(self, "graph_", None)
        if kept is not None:
            vectors, params, graph = kept
            same = vectors.device == database.device and params == self._graph_params()
            if same and torch.equal(vectors, database):
                return graph
        return self._graph(database)

    def _reranked(self, asked: Asked, top: int, index: Any) -> tuple[Int64[Tensor, "q top"], Float[Tensor, "q top"]]:
        longest = max(top, min(getattr(self, self._of_query), len(asked.database)))  # also beyond the candidates
        order, scores = self._ordered(asked, self._first(asked, longest, index), top)
        return order[:, :top], scores


def nearest(database: Float[Tensor, "n dim"], count: int, verbose: bool = False) -> Int64[Tensor, "n count"]:
    """The `count` nearest items of each item, itself first; duplicates might have put another one first."""
    lists = search(database, database, count, verbose)
    items = torch.arange(len(lists), device=lists.device).unsqueeze(1)
    away = (lists == items).long()
    away[:, -1] += 1 - away.sum(1)  # drop the last if the item is not in its list
    rest = lists.gather(1, away.argsort(dim=1, stable=True))[:, :-1]
    return torch.cat((items, rest), 1)


def sparse(
    rows: Int64[Tensor, " k"], columns: Int64[Tensor, " k"], values: Float[Tensor, " k"], shape: tuple[int, int]
) -> Tensor:
    """A sparse matrix; values at the same position are added."""
    indices = torch.stack((rows, columns))
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()


def mutual(near: Int64[Tensor, "n k"]) -> Bool[Tensor, "n k"]:
    """Which neighbours are reciprocal: have the item among their own."""
    items = torch.arange(len(near), device=near.device)
    return torch.cat([(near[near[chunk]] == chunk[:, None, None]).any(-1) for chunk in items.split(CHUNK)])
