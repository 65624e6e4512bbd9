"""What all re-rankers share: a first round, lists whose top is put in another order, and a reading of what moved.

Also the two that learn nothing and need no graph: affinities alone, and queries expanded by their neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import normalize

from keyquery.capture.load import pick_device
from keyquery.estimators.base import Estimator, check_sizes
from keyquery.estimators.inputs.vectors import Asked, asked_of, like, lists_of
from keyquery.estimators.rerank.network import affinities, cosines
from keyquery.estimators.rerank.reading import Reranking, Shown, reranking_of
from keyquery.estimators.rerank.search import search, search_index
from keyquery.support.checks import check_count

ROWS = {"cpu": 8192, "cuda": 131_072}  # candidates that are scored at a time
Own = TypeVar("Own", bound="ListReranker")


class ListReranker(Estimator, ABC):
    """Vectors in; for each query the `top` nearest of a database, in a better order."""

    top: int
    device: Any

    def fit(self: Own, features: Any = None, labels: Any = None) -> Own:
        """Nothing is learned; it is there so that all re-rankers are used alike."""
        self._check()
        return self

    def rerank(self, queries: Any, database: Any, top: int | None = None, index: Any = None) -> tuple[Any, Any]:
        """Places (q, top) in the database, best first, and their scores (q, top).

        `queries` (q, dim) and `database` (n, dim) are arrays of numpy, torch or lists; the answer is numpy unless
        queries are torch. `top` is that of the constructor unless given. `index` is a search of one's own over the
        same database, such as an index of faiss, for the first round; without it, that is exact.
        """
        asked = self._asked(queries, database)
        top = self._top(top, len(asked.database), "the database has")
        order, scores = self._reranked(asked, top, index)
        return like(queries, order), like(queries, scores)

    def rerank_lists(self, queries: Any, database: Any, lists: Any, top: int | None = None) -> tuple[Any, Any]:
        """Lists (q, m) of places in the database, of any first round, their first `top` in another order.

        What stands below keeps its order. Scores are those of the first `top`.
        """
        asked = self._asked(queries, database)
        found = lists_of(lists, len(asked.queries), len(asked.database), str(asked.queries.device))
        top = self._top(top, found.shape[1], "lists hold")
        order, scores = self._ordered(asked, found, top)
        return like(queries, order), like(queries, scores)

    def moves(
        self,
        queries: Any,
        database: Any,
        lists: Any = None,
        *,
        top: int | None = None,
        most: int = 10,
        names: Sequence[str] | None = None,
        query_names: Sequence[str] | None = None,
        images: Any = None,
        query_images: Any = None,
        relevant: Any = None,
    ) -> Reranking:
        """Before and after, the first `most` places of each query's list, as a Reading.

        What there is to show of items and queries: `names` and `query_names`, texts; `images` and `query_images`, what
        `kq.data.load_images` gives or uint8 (n, h, w) or (n, h, w, c); `relevant`, as in `kq.score_rankings`.
        """
        check_count("most", most)
        asked, seen = self._asked(queries, database), {"images": images, "query_images": query_images}
        shown = Shown(names=names, query_names=query_names, relevant=relevant, **seen)
        shown.check(len(asked.queries), len(asked.database))
        return reranking_of(repr(self), *self._both(asked, lists, top), most, shown)

    def before_and_after(
        self, queries: Any, database: Any, lists: Any = None, top: int | None = None
    ) -> tuple[Int64[Tensor, "q m"], Int64[Tensor, "q m"], Float[Tensor, "q top"]]:
        """Lists of the first round, or those given; the same re-ranked; and scores of the first `top`."""
        return self._both(self._asked(queries, database), lists, top)

    def _both(self, asked: Asked, lists: Any, top: int | None) -> tuple[Tensor, Tensor, Tensor]:
        if lists is None:
            top = self._top(top, len(asked.database), "the database has")
            before = search(*asked, top)
            after, scores = self._reranked(asked, top, None)
        else:
            before = lists_of(lists, len(asked.queries), len(asked.database), str(asked.queries.device))
            top = self._top(top, before.shape[1], "lists hold")
            after, scores = self._ordered(asked, before, top)
        return before.cpu(), after.cpu(), scores.cpu()

    def _check(self) -> None:
        check_sizes(self, ("top",))

    def _asked(self, queries: Any, database: Any) -> Asked:
        self._check()
        return asked_of(queries, database, pick_device(self.device))

    def _top(self, top: int | None, there: int, where: str) -> int:
        check_count("top", top, optional=True)
        chosen = int(self.top if top is None else top)
        if chosen > there:
            raise ValueError(f"top is {chosen}, but {where} only {there} items: give top={there} or less")
        return chosen

    def _first(self, asked: Asked, top: int, index: Any) -> Int64[Tensor, "q top"]:
        if index is None:
            return search(*asked, top)
        found = search_index(index, asked.queries, len(asked.database), top)
        return lists_of(found, len(asked.queries), len(asked.database), str(asked.queries.device))

    def _reranked(self, asked: Asked, top: int, index: Any) -> tuple[Int64[Tensor, "q top"], Float[Tensor, "q top"]]:
        return self._ordered(asked, self._first(asked, top, index), top)

    def _ordered(
        self, asked: Asked, lists: Int64[Tensor, "q m"], top: int
    ) -> tuple[Int64[Tensor, "q m"], Float[Tensor, "q top"]]:
        """The first `top` by their scores."""
        return by_score(lists, self._scores(asked, lists[:, :top]))

    @abstractmethod
    def _scores(self, asked: Asked, lists: Int64[Tensor, "q top"]) -> Float[Tensor, "q top"]:
        """What each candidate is worth, in the order of the lists."""


def by_score(
    lists: Int64[Tensor, "q m"], scores: Float[Tensor, "q top"]
) -> tuple[Int64[Tensor, "q m"], Float[Tensor, "q top"]]:
    """The first `top` of each list in the order of their scores, equal ones as they were; the rest stays behind them.

    >>> by_score(torch.tensor([[7, 8, 9]]), torch.tensor([[0.1, 0.9]]))[0]
    tensor([[8, 7, 9]])
    """
    top, order = scores.shape[1], scores.argsort(dim=1, descending=True, stable=True)
    return torch.cat((lists[:, :top].gather(1, order), lists[:, top:]), 1), scores.gather(1, order)


def in_batches(asked: Asked, lists: Int64[Tensor, "q top"]) -> list[Int64[Tensor, " some"]]:
    """Numbers of queries, as many at a time as have room."""
    each = lists.shape[1] + 1
    size = max(ROWS[asked.queries.device.type] // each, 1)
    return list(torch.arange(len(lists), device=lists.device).split(size))


def rows_of(
    asked: Asked, lists: Int64[Tensor, "q top"], some: Int64[Tensor, " some"]
) -> Float[Tensor, "some rows dim"]:
    """Each query and its candidates, (some, top + 1, dim), the query first."""
    return torch.cat((asked.queries[some].unsqueeze(1), asked.database[lists[some]]), 1)


def dots(asked: Asked, lists: Int64[Tensor, "q top"], some: Int64[Tensor, " some"]) -> Float[Tensor, "some top"]:
    """Dot products of some queries with their candidates."""
    return (asked.database[lists[some]] @ asked.queries[some].unsqueeze(-1)).squeeze(-1)


class AffinityReranker(ListReranker):
    """Candidates by the cosine of their affinities with the query's, to the query and its first `anchors` − 1 items.

    What `kq.Reranker` starts from, without learning: items are alike that are alike to the same items.

    >>> _ = torch.manual_seed(0)
    >>> database = torch.randn(50, 8)
    >>> order, scores = kq.AffinityReranker(top=10, anchors=6).rerank(database[:2], database)
    >>> order.shape, bool((order[:, 0] == torch.tensor([0, 1])).all())
    (torch.Size([2, 10]), True)
    """

    def __init__(self, top: int = 1024, anchors: int = 512, device: str | torch.device = "auto") -> None:
        self.top, self.anchors, self.device = top, anchors, device

    def _check(self) -> None:
        check_sizes(self, ("top", "anchors"))

    def _scores(self, asked: Asked, lists: Int64[Tensor, "q top"]) -> Float[Tensor, "q top"]:
        check_anchors(self.anchors, lists.shape[1])
        found = [
            cosines(affinities(rows_of(asked, lists, some), self.anchors))[:, 1:] for some in in_batches(asked, lists)
        ]
        return torch.cat(found)


def check_anchors(anchors: int, top: int) -> None:
    """Refuse lists that are too short for anchors: the query and the first `anchors` − 1 candidates."""
    if top < anchors - 1:
        raise ValueError(
            f"anchors is {anchors}, so that lists need {anchors - 1} candidates or more, got {top}: give fewer"
        )


class AlphaQueryExpansion(ListReranker):
    """Queries moved towards what they find: q + Σ_i max(q·x_i, 0)^α x_i over its `neighbours`, of length 1 again.

    `rerank` searches the whole database with it, `rerank_lists` the first `top` of each list.

    >>> database = torch.tensor([[1.0, 0.1, 0.0], [0.8, 0.6, 0.0], [0.8, 0.0, -0.6]])
    >>> kq.AlphaQueryExpansion(top=3, neighbours=2).rerank([[1.0, 0.0, 0.0]], database)[0]
    array([[0, 1, 2]])
    """

    def __init__(
        self, top: int = 1024, neighbours: int = 5, alpha: float = 3.0, device: str | torch.device = "auto"
    ) -> None:
        self.top, self.neighbours, self.alpha, self.device = top, neighbours, alpha, device

    def _check(self) -> None:
        check_sizes(self, ("top", "neighbours"), alpha=float("inf"))

    def _expanded(self, asked: Asked, lists: Int64[Tensor, "q m"]) -> Float[Tensor, "q dim"]:
        if lists.shape[1] < self.neighbours:
            raise ValueError(f"neighbours is {self.neighbours}, but lists hold only {lists.shape[1]} items")
        near = asked.database[lists[:, : self.neighbours]]
        weight = (near @ asked.queries.unsqueeze(-1)).clamp(min=0) ** self.alpha
        return normalize(asked.queries + (weight * near).sum(1), dim=-1)

    def _reranked(self, asked: Asked, top: int, index: Any) -> tuple[Int64[Tensor, "q top"], Float[Tensor, "q top"]]:
        first = self._first(asked, min(self.neighbours, len(asked.database)), index)
        again = Asked(self._expanded(asked, first), asked.database)
        found = self._first(again, top, index)
        return found, _all_dots(again, found)

    def _scores(self, asked: Asked, lists: Int64[Tensor, "q top"]) -> Float[Tensor, "q top"]:
        return _all_dots(Asked(self._expanded(asked, lists), asked.database), lists)


def _all_dots(asked: Asked, lists: Int64[Tensor, "q top"]) -> Float[Tensor, "q top"]:
    return torch.cat([dots(asked, lists, some) for some in in_batches(asked, lists)])
