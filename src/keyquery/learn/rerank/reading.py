"""Ranked lists before and after re-ranking, as a Reading."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from keyquery.learn.data.images import Images
from keyquery.learn.rankings.rankings import score_rankings
from keyquery.reading import Reading, digests, provenance
from keyquery.support.extras import optional

EDGE = 64  # largest side of a thumbnail, in pixels


@dataclass(frozen=True, kw_only=True, repr=False)
class Reranking(Reading, kind="reranking"):
    """The first ranks of each query's list, before and after re-ranking.

    A query has lists `before` and `after`, and for every item in them, in `items`, its ranks from 1 (None: below the
    list), its score, and whether it is relevant, if known. `precision` is the average precision of the whole lists.
    """

    units: ClassVar[Mapping[str, str]] = {
        "place": "rank, from 1",
        "score": "the score that items are ranked by",
        "precision": "standard average precision of the whole list",
    }

    method: str  # name of the re-ranker
    top: int  # re-ranked candidates per list
    most: int  # ranks that are reported
    queries: Sequence[Mapping[str, Any]]  # per query: `before`, `after`, `items` and `precision`
    thumbnails: Mapping[str, str]  # PNG files in base64, by "query 3" and "item 7"

    def __repr__(self) -> str:
        count = len(self.queries)
        return f"Reranking({count} queries, {self.moved} of {count * self.most} top ranks changed)"

    @property
    def moved(self) -> int:
        """Number of reported ranks whose item has changed."""
        lists = [(query["before"], query["after"]) for query in self.queries]
        return sum(old != new for before, after in lists for old, new in zip(before, after, strict=True))

    def records(self) -> list[dict[str, Any]]:
        """One row per query and item; `moved` is the number of ranks it moved up."""
        return [
            {"query": query["query"], "query_name": query["name"], **item, "moved": moved(item)}
            for query in self.queries
            for item in query["items"]
        ]


def moved(item: Mapping[str, Any]) -> int | None:
    """Number of ranks an item moved up; None if one rank is unknown."""
    return None if None in (item["before"], item["after"]) else item["before"] - item["after"]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Names, images and relevance of items and queries, for display."""

    names: Sequence[str] | None = None
    query_names: Sequence[str] | None = None
    images: Any = None
    query_images: Any = None
    relevant: Any = None

    def check(self, queries: int, items: int) -> None:
        """Require one per item and one per query."""
        for name in ("names", "query_names", "images", "query_images"):
            if (entries := getattr(self, name)) is not None:
                count, of = (queries, "query") if "query" in name else (items, "item of the database")
                if len(entries) != count:
                    raise ValueError(f"{name} must have one entry per {of}, {count}, got {len(entries)}")
                if "images" in name:
                    _pixels(name, entries)


def reranking_of(
    method: str,
    before: Int64[Tensor, "q m"],
    after: Int64[Tensor, "q m"],
    scores: Float[Tensor, "q top"],
    most: int,
    shown: Shown,
) -> Reranking:
    """The reading of lists before and after."""
    most, queries, sides = min(most, before.shape[1]), [], {"before": before, "after": after}
    known = {} if shown.relevant is None else sides
    precisions = {side: score_rankings(lists, shown.relevant).rows for side, lists in known.items()}
    for number, lists in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        query = {
            "query": number,
            "name": None if shown.query_names is None else str(shown.query_names[number]),
            "precision": {side: rows[number]["average_precision"] for side, rows in precisions.items()} or None,
            "before": lists[0][:most],
            "after": lists[1][:most],
        }
        queries.append(query | {"items": _items(*lists, scores[number].tolist(), most, shown, number)})
    return Reranking(
        method=method,
        top=scores.shape[1],
        most=most,
        queries=queries,
        thumbnails=_thumbnails(queries, shown),
        provenance=provenance(method=method, tensors=digests({**sides, "scores": scores})),
    )


def _items(
    before: list[int], after: list[int], scores: list[float], most: int, shown: Shown, query: int
) -> list[dict[str, Any]]:
    """What is known of the items of a query's first ranks."""
    ranks = [{item: rank for rank, item in enumerate(ranked, 1)} for ranked in (before, after)]
    score = dict(zip(after, scores, strict=False))
    relevant: set[int] | None = None
    if shown.relevant is not None:
        row = np.asarray(torch.as_tensor(shown.relevant[query]).cpu())
        relevant = set((np.flatnonzero(row) if row.dtype == bool else row).tolist())
    return [
        {
            "item": item,
            "name": None if shown.names is None else str(shown.names[item]),
            "before": ranks[0].get(item),
            "after": ranks[1].get(item),
            "score": score.get(item),
            "relevant": None if relevant is None else item in relevant,
        }
        for item in dict.fromkeys([*after[:most], *before[:most]])
    ]


def _thumbnails(queries: list[dict[str, Any]], shown: Shown) -> dict[str, str]:
    items = sorted({item["item"] for query in queries for item in query["items"]})
    thumbnails: dict[str, str] = {}
    for kind, name, numbers in (("query", "query_images", range(len(queries))), ("item", "images", items)):
        if getattr(shown, name) is not None:
            pixels = _pixels(name, getattr(shown, name))
            thumbnails |= {f"{kind} {number}": _thumbnail(pixels[number]) for number in numbers}
    return thumbnails


def _pixels(name: str, images: Any) -> UInt8[np.ndarray, "n h w c"]:
    array = images.pixels if isinstance(images, Images) else np.asarray(images)
    array = array[..., None] if array.ndim == 3 else array
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise ValueError(f"{name} must be uint8 (n, h, w) or (n, h, w, 1 or 3), got {array.dtype} {array.shape}")
    return array


def _thumbnail(pixels: UInt8[np.ndarray, "h w c"]) -> str:
    """A small PNG file of an image, in base64; a large one becomes the means of its blocks."""
    image = optional("PIL.Image", "a thumbnail").fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0])
    file = io.BytesIO()
    image.reduce(-(-max(image.size) // EDGE)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
