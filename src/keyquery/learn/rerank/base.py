"""Base class of the re-rankers, and two training-free ones: affinities and α-weighted query expansion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import normalize

from keyquery.learn.base import Estimator, check_sizes
from keyquery.learn.inputs.vectors import Asked, asked_of, like, lists_of, vectors_of
from keyquery.learn.rerank.network import PUBLISHED_ANCHORS, TOP, affinities, check_anchors, cosines
from keyquery.learn.rerank.reading import Reranking, Shown, reranking_of
from keyquery.support.checks import check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import bars

QUERIES, ITEMS = 1024, 65_536  # per batch of dot products of a search
ROWS = {"cpu": 8192, "cuda": 131_072}  # candidates per batch
# Most floats of a batch's widest activations on a CPU. The allocator maps larger tensors anew each time, and faulting
# their pages in takes longer than larger matrix products save.
FLOATS = 2**22


class ListReranker(Estimator, ABC):
    """Re-ranks the `top` nearest neighbours of each query in a database of vectors."""

    top: int | None
    device: Any
    verbose: bool = False
    database_: Any  # of `fit`, as given; None without

    def fit(self, features: Any = None, labels: Any = None) -> Self:
        """Keep a database of vectors (n, dim) for later queries, if given; nothing is trained."""
        self._check()
        if features is not None:
            self.n_features_in_ = vectors_of("features", features).shape[1]
        self.database_ = features
        return self

    def rerank(self, queries: Any, database: Any = None, top: int | None = None, index: Any = None) -> tuple[Any, Any]:
        """Search the database, by `index` if given, and re-rank the nearest neighbours of each query."""
        asked = self._asked(queries, database)
        order, scores = self._reranked(asked, self._top(top, len(asked.database), "the database has"), index)
        return like(queries, order), like(queries, scores)

    def rerank_lists(self, queries: Any, database: Any, lists: Any, top: int | None = None) -> tuple[Any, Any]:
        """Re-rank the first `top` of ranked lists (q, m) of database indices, from any first stage.

        The rest of each list keeps its order. Returns lists (q, m) and the scores (q, top) of the re-ranked part.
        """
        _, order, scores = self.before_and_after(queries, database, lists, top)
        return like(queries, order), like(queries, scores)

    def moves(
        self, queries: Any, database: Any, lists: Any = None, *, top: int | None = None, most: int = 10, **shown: Any
    ) -> Reranking:
        """The first `most` ranks of each query before and after re-ranking, as a Reading.

        `shown` may hold `names` and `images` of the items, `query_names`, `query_images`, and the `relevant` items.
        """
        check_count("most", most)
        asked, display = self._asked(queries, database), Shown(**shown)
        display.check(len(asked.queries), len(asked.database))
        return reranking_of(repr(self), *self._before_and_after(asked, lists, top), most, display)

    def before_and_after(
        self, queries: Any, database: Any, lists: Any = None, top: int | None = None
    ) -> tuple[Int64[Tensor, "q m"], Int64[Tensor, "q m"], Float[Tensor, "q top"]]:
        """Lists before and after re-ranking, and the scores of the first `top`. Default lists: exact search."""
        return self._before_and_after(self._asked(queries, database), lists, top)

    def _before_and_after(self, asked: Asked, lists: Any, top: int | None) -> tuple[Tensor, Tensor, Tensor]:
        if lists is None:
            top = self._top(top, len(asked.database), "the database has")
            before, (after, scores) = search(*asked, top, self.verbose), self._reranked(asked, top, None)
        else:
            before = lists_of(lists, len(asked.queries), len(asked.database), str(asked.queries.device))
            after, scores = self._ordered(asked, before, self._top(top, before.shape[1], "lists hold"))
        return before.cpu(), after.cpu(), scores.cpu()

    def _check(self) -> None:
        check_count("top", self.top, optional=True)

    def _asked(self, queries: Any, database: Any) -> Asked:
        self._check()
        return asked_of(queries, self._database(database), pick_device(self.device))

    def _database(self, database: Any) -> Any:
        """The database, or that of `fit`."""
        if database is None:
            database = getattr(self, "database_", None)
        if database is None:
            raise ValueError("database must be vectors (n, dim): it may be omitted only after fit(database)")
        return database

    def _top(self, top: int | None, available: int, where: str) -> int:
        check_count("top", top, optional=True)
        chosen = self.top if top is None else top
        if chosen is None:
            return min(TOP, available)
        if chosen > available:
            raise ValueError(f"top is {chosen}, but {where} only {available} items: use top={available} or less")
        return int(chosen)

    def _first(self, asked: Asked, top: int, index: Any) -> Int64[Tensor, "q top"]:
        return search(*asked, top, self.verbose) if index is None else search_index(index, asked, top)

    def _reranked(self, asked: Asked, top: int, index: Any) -> tuple[Int64[Tensor, "q top"], Float[Tensor, "q top"]]:
        return self._ordered(asked, self._first(asked, top, index), top)

    def _ordered(
        self, asked: Asked, lists: Int64[Tensor, "q m"], top: int
    ) -> tuple[Int64[Tensor, "q m"], Float[Tensor, "q top"]]:
        """The first `top` of each list sorted by score, stably; the rest follows unchanged."""
        scores = self._scores(asked, lists, top)
        order = scores.argsort(dim=1, descending=True, stable=True)
        return torch.cat((lists[:, :top].gather(1, order), lists[:, top:]), 1), scores.gather(1, order)

    @abstractmethod
    def _scores(self, asked: Asked, lists: Int64[Tensor, "q m"], top: int) -> Float[Tensor, "q top"]:
        """Scores of the first `top` of each list, in their order."""


def in_batches(
    asked: Asked, lists: Int64[Tensor, "q top"], verbose: bool = False, widest: int = 1
) -> Iterator[Int64[Tensor, " some"]]:
    """Query indices in batches that fit into memory; `widest` is the floats per candidate."""
    device = asked.queries.device.type
    rows = min(ROWS[device], FLOATS // widest) if device == "cpu" else ROWS[device]
    batches = torch.arange(len(lists), device=lists.device).split(max(rows // (lists.shape[1] + 1), 1))
    with bars(verbose) as progress:
        yield from progress(batches, "re-ranking", len(batches))


def rows_of(
    asked: Asked, lists: Int64[Tensor, "q top"], chosen: Int64[Tensor, " some"]
) -> Float[Tensor, "some rows dim"]:
    """Each query and its candidates, (some, top + 1, dim), the query first."""
    return torch.cat((asked.queries[chosen].unsqueeze(1), asked.database[lists[chosen]]), 1)


def dots(asked: Asked, lists: Int64[Tensor, "q top"], chosen: Int64[Tensor, " some"]) -> Float[Tensor, "some top"]:
    """Dot products of some queries with their candidates."""
    return (asked.database[lists[chosen]] @ asked.queries[chosen].unsqueeze(-1)).squeeze(-1)


def search(
    queries: Float[Tensor, "q dim"], database: Float[Tensor, "n dim"], top: int, verbose: bool = False
) -> Int64[Tensor, "q top"]:
    """The `top` items of the database nearest to each query, by dot product, best first.

    Exact; ties are sorted by index, except among those at the end of the list.
    """
    chunks = queries.split(QUERIES)
    with bars(verbose) as progress:
        return torch.cat([_nearest(chunk, database, top) for chunk in progress(chunks, "searching", len(chunks))])


def search_index(index: Any, asked: Asked, top: int) -> Int64[Tensor, "q top"]:
    """The same with a search index over the database, such as one of faiss."""
    queries, database = asked
    if not hasattr(index, "search"):
        raise TypeError(f"index must have search(vectors, k), like a faiss index, got {type(index).__name__}")
    for name, attribute, expected in (("items", "ntotal", len(database)), ("dims", "d", queries.shape[1])):
        if (actual := getattr(index, attribute, expected)) != expected:
            raise ValueError(f"index does not fit the database: it has {actual} {name}, not {expected}")
    lists = np.asarray(index.search(queries.float().cpu().numpy(), top)[1])
    if lists.shape != (len(queries), top):
        raise ValueError(f"index.search must return indices ({len(queries)}, {top}), got {lists.shape}")
    if (lists < 0).any():
        row = (lists < 0).any(1).argmax()
        raise ValueError(f"index finds fewer than {top} items for query {row}: widen its search, or use a smaller top")
    return lists_of(lists, len(queries), len(database), str(queries.device))


def _nearest(queries: Tensor, database: Tensor, top: int) -> Tensor:
    scores = queries.new_empty(len(queries), 0)
    items = scores.long()
    for start in range(0, len(database), ITEMS):
        part = queries @ database[start : start + ITEMS].mT
        best = part.topk(min(top, part.shape[1]), dim=1)
        scores, items = torch.cat((scores, best.values), 1), torch.cat((items, best.indices + start), 1)
        kept = scores.topk(min(top, scores.shape[1]), dim=1).indices
        scores, items = scores.gather(1, kept), items.gather(1, kept)
    by_index = items.sort(dim=1)  # the next sort is stable
    order = scores.gather(1, by_index.indices).argsort(dim=1, descending=True, stable=True)
    return by_index.values.gather(1, order)


@dataclass(eq=False, repr=False)
class AffinityReranker(ListReranker):
    """Training-free re-ranking by the cosine between the affinity vectors of candidate and query.

    From a paper: mAP below the first ranking on three datasets (.419, .155, .151; .440, .167, .202).

    The affinity vector holds the dot products with the query and its first `anchors` − 1 neighbours; it is the input
    of `kq.Reranker`.

    Parameters
    ----------
    top
        Candidates per query that are re-ranked. Default: 1024, or all if there are fewer.
    anchors
        Length of the affinity vectors. Default: 512, or all candidates if there are fewer.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere lines. Default: False.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> database = torch.randn(50, 8)
    >>> order, scores = kq.AffinityReranker(top=10, anchors=6).rerank(database[:2], database)
    >>> order.shape, bool((order[:, 0] == torch.tensor([0, 1])).all())
    (torch.Size([2, 10]), True)
    """

    top: int | None = None
    anchors: int | None = None
    device: str | torch.device = "auto"
    verbose: bool = False

    def _check(self) -> None:
        super()._check()
        check_count("anchors", self.anchors, optional=True)

    def _scores(self, asked: Asked, lists: Int64[Tensor, "q m"], top: int) -> Float[Tensor, "q top"]:
        anchors = min(PUBLISHED_ANCHORS, top + 1) if self.anchors is None else self.anchors
        check_anchors(anchors, top)
        lists = lists[:, :top]
        batches = in_batches(asked, lists, self.verbose)
        return torch.cat([cosines(affinities(rows_of(asked, lists, chosen), anchors))[:, 1:] for chosen in batches])


@dataclass(eq=False, repr=False)
class AlphaQueryExpansion(ListReranker):
    """α-weighted query expansion (αQE): training-free re-ranking with expanded queries.

        q' = normalize(q + Σ_i max(q·x_i, 0)^α x_i)   over the nearest neighbours x_i of q

    `rerank` searches the whole database with q', `rerank_lists` re-ranks the first `top` of each list.

    Parameters
    ----------
    top, device, verbose
        As in `kq.AffinityReranker`.
    neighbours
        Neighbours in the sum; all candidates, if there are fewer. Default: 5.
    alpha
        Exponent α. Default: 3.

    Examples
    --------
    >>> database = torch.tensor([[1.0, 0.1, 0.0], [0.8, 0.6, 0.0], [0.8, 0.0, -0.6]])
    >>> kq.AlphaQueryExpansion(top=3, neighbours=2).rerank([[1.0, 0.0, 0.0]], database)[0]
    array([[0, 1, 2]])
    """

    top: int | None = None
    neighbours: int = 5
    alpha: float = 3.0
    device: str | torch.device = "auto"
    verbose: bool = False

    def _check(self) -> None:
        super()._check()
        check_sizes(self, ("neighbours",), alpha=float("inf"))

    def _expanded(self, asked: Asked, lists: Int64[Tensor, "q m"]) -> Asked:
        near = asked.database[lists[:, : self.neighbours]]
        weight = (near @ asked.queries.unsqueeze(-1)).clamp(min=0) ** self.alpha
        return asked._replace(queries=normalize(asked.queries + (weight * near).sum(1), dim=-1))

    def _reranked(self, asked: Asked, top: int, index: Any) -> tuple[Int64[Tensor, "q top"], Float[Tensor, "q top"]]:
        expanded = self._expanded(asked, self._first(asked, min(self.neighbours, len(asked.database)), index))
        lists = self._first(expanded, top, index)
        return lists, self._dots(expanded, lists)

    def _scores(self, asked: Asked, lists: Int64[Tensor, "q m"], top: int) -> Float[Tensor, "q top"]:
        return self._dots(self._expanded(asked, lists[:, :top]), lists[:, :top])

    def _dots(self, asked: Asked, lists: Int64[Tensor, "q top"]) -> Float[Tensor, "q top"]:
        return torch.cat([dots(asked, lists, chosen) for chosen in in_batches(asked, lists, self.verbose)])
