"""First-stage retrieval: exact nearest neighbours by dot product, or those of a search index."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from keyquery.learn.inputs.vectors import Asked, lists_of
from keyquery.support.progress import bars

QUERIES, ITEMS = 1024, 65_536  # per batch of dot products


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
