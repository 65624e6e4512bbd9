"""First-stage retrieval: nearest neighbours by dot product, with faiss if installed, or torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.progress import bars

ENGINES = ("auto", "faiss", "torch")
QUERIES, ITEMS = 1024, 65_536  # per batch of dot products
CHUNK = 1024  # items per batch
Nearest = Callable[[Tensor], tuple[Tensor, Tensor]]  # queries (q, dim) → scores and places (q, top)


@runtime_checkable
class Index(Protocol):
    """A search index, such as one of faiss: `search(vectors, k)` returns scores and indices, best first."""

    def search(self, vectors: Any, k: int) -> Any:
        """Scores (q, k) and indices (q, k) into the database."""


def search(
    queries: Float[Tensor, "q dim"],
    database: Float[Tensor, "n dim"],
    top: int,
    engine: str = "auto",
    verbose: bool = False,
) -> Int64[Tensor, "q top"]:
    """The `top` items of the database nearest to each query, by dot product, best first.

    Exact with either engine; ties are sorted by index, except among those at the end of the list. "auto" is faiss if it
    is installed and vectors are on the CPU, else torch. `verbose` shows progress.
    """
    check_choice("engine", engine, ENGINES)
    if engine == "auto":
        engine = "faiss" if has_faiss() and not queries.is_cuda and queries.dtype == torch.float32 else "torch"
    if top > len(database):
        raise ValueError(f"top is {top}, but the database has only {len(database)} items")
    nearest = (_by_faiss if engine == "faiss" else _by_torch)(database, top)
    chunks = queries.split(QUERIES)
    with bars(verbose) as progress:
        return torch.cat([_in_order(*nearest(chunk)) for chunk in progress(chunks, "searching", len(chunks))])


def search_index(index: Any, queries: Float[Tensor, "q dim"], count: int, top: int) -> Int64[Tensor, "q top"]:
    """The same with a search index over the `count` items of the database, in its order."""
    if not isinstance(index, Index):
        raise TypeError(f"index must have search(vectors, k), like a faiss index, got {type(index).__name__}")
    for name, own, expected in (("items", "ntotal", count), ("dims", "d", queries.shape[1])):
        if (actual := getattr(index, own, expected)) != expected:
            raise ValueError(f"index does not fit the database: it has {actual} {name}, not {expected}")
    _, indices = index.search(queries.float().cpu().numpy(), top)
    places = torch.as_tensor(np.asarray(indices)).to(queries.device)
    if places.shape != (len(queries), top):
        raise ValueError(f"index.search must return indices ({len(queries)}, {top}), got {tuple(places.shape)}")
    if (places < 0).any():
        row = int((places < 0).any(1).nonzero()[0, 0])
        raise ValueError(f"index finds fewer than {top} items for query {row}: widen its search, or use a smaller top")
    return places.long()


def itself_first(lists: Int64[Tensor, "n size"]) -> Int64[Tensor, "n size"]:
    """Put each item first in its own list; duplicates may have put another one first, or left it out."""
    own = torch.arange(len(lists), device=lists.device).unsqueeze(1)
    away = (lists == own).long()
    away[:, -1] += 1 - away.sum(1)  # drop the last if the item is not in its list
    rest = lists.gather(1, away.argsort(dim=1, stable=True))[:, :-1]
    return torch.cat((own, rest), 1)


def mutual(near: Int64[Tensor, "n k"]) -> Bool[Tensor, "n k"]:
    """Which neighbours are reciprocal: have the item among their own."""
    own = torch.arange(len(near), device=near.device)
    return torch.cat([(near[near[chunk]] == chunk[:, None, None]).any(-1) for chunk in own.split(CHUNK)])


@cache
def has_faiss() -> bool:
    """Whether faiss can be imported."""
    try:
        optional("faiss", "search")
    except ImportError:
        return False
    return True


def _by_faiss(database: Tensor, top: int) -> Nearest:
    faiss = optional("faiss", "engine 'faiss'")
    index = faiss.IndexFlatIP(database.shape[1])
    index.add(database.float().cpu().contiguous().numpy())

    def nearest(chunk: Tensor) -> tuple[Tensor, Tensor]:
        scores, places = index.search(chunk.float().cpu().contiguous().numpy(), top)
        return torch.from_numpy(scores).to(chunk.device), torch.from_numpy(places).to(chunk.device)

    return nearest


def _by_torch(database: Tensor, top: int) -> Nearest:
    def nearest(chunk: Tensor) -> tuple[Tensor, Tensor]:
        best: tuple[Tensor, Tensor] | None = None
        for start in range(0, len(database), ITEMS):
            scores = chunk @ database[start : start + ITEMS].mT
            highest = scores.topk(min(top, scores.shape[1]), dim=1)
            pair = (highest.values, highest.indices + start)
            if best is not None:
                both = [torch.cat(parts, 1) for parts in zip(best, pair, strict=True)]
                kept = both[0].topk(min(top, both[0].shape[1]), dim=1).indices
                pair = (both[0].gather(1, kept), both[1].gather(1, kept))
            best = pair
        assert best is not None
        return best

    return nearest


def _in_order(scores: Tensor, places: Tensor) -> Tensor:
    """Best first; ties by index."""
    by_place = places.sort(dim=1)
    order = scores.gather(1, by_place.indices).argsort(dim=1, descending=True, stable=True)
    return by_place.values.gather(1, order)
