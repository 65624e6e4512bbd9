"""Ranked lists before and after re-ranking, as a Reading."""

from __future__ import annotations

import base64
import struct
import zlib
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
        for name, count in (("names", items), ("query_names", queries), ("images", items), ("query_images", queries)):
            entries = getattr(self, name)
            if entries is not None and len(entries) != count:
                kind = "item of the database" if count == items and "query" not in name else "query"
                raise ValueError(f"{name} must have one entry per {kind}, {count}, got {len(entries)}")
            if entries is not None and "images" in name:
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
    most, queries = min(most, before.shape[1]), []
    sides = {"before": before, "after": after}
    scored = {
        side: score_rankings(lists, shown.relevant).rows for side, lists in sides.items() if shown.relevant is not None
    }
    for number, lists in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        precision = {side: rows[number]["average_precision"] for side, rows in scored.items()} or None
        name = None if shown.query_names is None else str(shown.query_names[number])
        places = _places(lists, scores[number].tolist(), most, shown, number)
        queries.append({"query": number, "name": name, "precision": precision, **places})
    return Reranking(
        method=method,
        top=scores.shape[1],
        most=most,
        queries=queries,
        thumbnails=_thumbnails(queries, shown),
        provenance=provenance(method=method, tensors=digests({"before": before, "after": after, "scores": scores})),
    )


def _places(
    lists: tuple[list[int], list[int]], scores: list[float], most: int, shown: Shown, query: int
) -> dict[str, Any]:
    """The first ranks of a query's lists, and what is known of their items."""
    ranks = [{item: rank for rank, item in enumerate(ranked, 1)} for ranked in lists]
    relevant: set[int] | None = None
    if shown.relevant is not None:
        row = np.asarray(torch.as_tensor(shown.relevant[query]).cpu())
        relevant = set((np.flatnonzero(row) if row.dtype == bool else row).tolist())
    before, after = lists[0][:most], lists[1][:most]
    items = [
        {
            "item": item,
            "name": None if shown.names is None else str(shown.names[item]),
            "before": ranks[0].get(item),
            "after": (rank := ranks[1].get(item)),
            "score": scores[rank - 1] if rank is not None and rank <= len(scores) else None,
            "relevant": None if relevant is None else item in relevant,
        }
        for item in dict.fromkeys([*after, *before])
    ]
    return {"before": before, "after": after, "items": items}


def _thumbnails(queries: list[dict[str, Any]], shown: Shown) -> dict[str, str]:
    thumbnails: dict[str, str] = {}
    if shown.query_images is not None:
        pixels = _pixels("query_images", shown.query_images)
        thumbnails |= {f"query {query['query']}": thumbnail(pixels[query["query"]]) for query in queries}
    if shown.images is not None:
        pixels = _pixels("images", shown.images)
        items = sorted({item["item"] for query in queries for item in query["items"]})
        thumbnails |= {f"item {item}": thumbnail(pixels[item]) for item in items}
    return thumbnails


def _pixels(name: str, images: Any) -> UInt8[np.ndarray, "n h w c"]:
    array = images.pixels if isinstance(images, Images) else np.asarray(images)
    array = array[..., None] if array.ndim == 3 else array
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise ValueError(
            f"{name} must be uint8 (n, h, w) or (n, h, w, c) with c 1 or 3, got {array.dtype} {array.shape}"
        )
    return array


def thumbnail(pixels: UInt8[np.ndarray, "h w c"]) -> str:
    """A small PNG file of an image, in base64; a large one becomes the means of its blocks."""
    block = -(-max(pixels.shape[:2]) // EDGE)
    if block > 1:
        rows, columns = (range(0, size, block) for size in pixels.shape[:2])
        means = [[pixels[y : y + block, x : x + block].mean((0, 1)) for x in columns] for y in rows]
        pixels = np.rint(means).astype(np.uint8)
    height, width, channels = pixels.shape
    kind = 0 if channels == 1 else 2  # grey, or colour
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)  # no filter
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
        data += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return base64.b64encode(data).decode()
