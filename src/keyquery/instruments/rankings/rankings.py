"""`score_rankings`: how good ranked lists are, by measures that are named and never mixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int
from torch import Tensor

from keyquery.data.retrieval import SETUPS, Revisited
from keyquery.reading import Reading, digest, provenance
from keyquery.support.checks import check_count


@dataclass(frozen=True, kw_only=True, repr=False)
class RankingScores(Reading, kind="ranking scores"):
    """Every measure of every list; a query to which nothing is relevant has none, and counts nowhere."""

    units: ClassVar[Mapping[str, str]] = {
        "average_precision": "mean over relevant items of the precision at their rank",
        "trapezoidal_precision": "area under precision over recall by trapezia, as in the revisited Oxford protocol",
        "recall": "share of the relevant items among the first k",
        "ndcg": "discounted gain of the first k, of what is possible",
    }

    at: Sequence[int]
    rows: Sequence[Mapping[str, Any]]  # one a query

    def __repr__(self) -> str:
        said = ", ".join(f"{name} {value:.4f}" for name, value in self.mean.items())
        return f"RankingScores({len(self.scored)} queries: {said})"

    @property
    def scored(self) -> list[Mapping[str, Any]]:
        """Rows of queries to which something is relevant."""
        return [row for row in self.rows if row["relevant"]]

    @property
    def mean(self) -> dict[str, float]:
        """The mean of every measure over queries: of `average_precision` that is what is called mAP."""
        names = [name for name in self.rows[0] if name not in ("query", "relevant")]
        return {name: float(np.mean([row[name] for row in self.scored])) for name in names} if self.scored else {}

    def records(self) -> list[dict[str, Any]]:
        """One row a query."""
        return [dict(row) for row in self.rows]


def average_precision(ranks: Int[np.ndarray, " hits"], relevant: int) -> float:
    """Standard AP: (1/n) Σ_j (j + 1)/(ρ_j + 1), ρ_j the rank of the j-th hit, both from 0, n = `relevant`.

    >>> round(average_precision(np.array([0, 2, 5]), 3), 3)
    0.722
    """
    return float((np.arange(1, len(ranks) + 1) / (ranks + 1)).sum() / relevant)


def trapezoidal_precision(ranks: Int[np.ndarray, " hits"], relevant: int) -> float:
    """AP by trapezia: (1/n) Σ_j ½(j/ρ_j + (j + 1)/(ρ_j + 1)), the first term 1 where ρ_j = 0. Never above standard AP.

    >>> round(trapezoidal_precision(np.array([0, 2, 5]), 3), 3)
    0.678
    """
    order = np.arange(len(ranks))
    before = np.where(ranks == 0, 1.0, order / np.maximum(ranks, 1))
    return float((before + (order + 1) / (ranks + 1)).sum() / 2 / relevant)


def recall(ranks: Int[np.ndarray, " hits"], relevant: int, k: int) -> float:
    """The share of the relevant items that stand among the first k.

    >>> recall(np.array([0, 2, 5]), 4, 3)
    0.5
    """
    return float((ranks < k).sum() / relevant)


def ndcg(ranks: Int[np.ndarray, " hits"], relevant: int, k: int) -> float:
    """Σ 1/log₂(ρ_j + 2) over hits among the first k, divided by that of a list with all relevant items first.

    >>> ndcg(np.array([0, 1]), 2, 10)
    1.0
    """
    gain = (1 / np.log2(ranks[ranks < k] + 2)).sum()
    return float(gain / (1 / np.log2(np.arange(min(relevant, k)) + 2)).sum())


def score_rankings(ranked: Any, relevant: Any, junk: Any = None, at: Sequence[int] = (1, 10, 100)) -> RankingScores:
    """Measures of ranked lists (q, m) of places in a database, best first.

    `relevant` says which items are: a boolean array (q, n) over the database, or for each query its places. Relevant
    items that a list does not hold were not found. `junk`, told in the same way, is taken out of the lists, neither
    right nor wrong. `at` are the k of recall and nDCG.

    >>> scores = kq.score_rankings([[3, 1, 0, 2]], relevant=[[3, 2]], at=(1,))
    >>> scores.mean["average_precision"], scores.mean["recall@1"]
    (0.75, 0.5)
    """
    lists = _lists(ranked)
    if isinstance(at, int):
        raise TypeError(f"at must be several k, such as (1, 10), got {at}")
    for k in at:
        check_count("a k of at", k)
    wanted = _places("relevant", relevant, lists)
    left_out = [np.empty(0, dtype=np.int64)] * len(lists) if junk is None else _places("junk", junk, lists)
    rows = [
        {"query": number, **_measures(*one, at)} for number, one in enumerate(zip(lists, wanted, left_out, strict=True))
    ]
    return RankingScores(
        at=list(at), rows=rows, provenance=provenance(junk=junk is not None, tensors={"lists": digest(lists)})
    )


def score_revisited(ranked: Any, truth: Revisited, at: Sequence[int] = (1, 5, 10)) -> dict[str, RankingScores]:
    """Lists of ROxford or RParis under each of its setups; published figures are means of `trapezoidal_precision`.

    Easy: easy items are to be found, hard ones are junk. Medium: both are to be found. Hard: easy ones are junk.
    """
    return {name: score_rankings(ranked, *truth.setup(name), at) for name in SETUPS}


def _measures(
    ranked: Int[np.ndarray, " m"], relevant: Int[np.ndarray, " r"], junk: Int[np.ndarray, " j"], at: Iterable[int]
) -> dict[str, Any]:
    if (both := np.intersect1d(relevant, junk)).size:
        raise ValueError(f"an item is relevant or junk, not both, got {both[0]} in each")
    kept = ranked[~np.isin(ranked, junk)]
    ranks, count = np.flatnonzero(np.isin(kept, relevant)), len(relevant)
    precise = {"average_precision": average_precision, "trapezoidal_precision": trapezoidal_precision}
    found: dict[str, Any] = {name: measure(ranks, count) if count else None for name, measure in precise.items()}
    for k in at:
        found |= {f"recall@{k}": recall(ranks, count, k) if count else None}
        found |= {f"ndcg@{k}": ndcg(ranks, count, k) if count else None}
    return {"relevant": count, **found}


def _lists(ranked: Any) -> Int[np.ndarray, "q m"]:
    found = np.asarray(ranked.detach().cpu() if isinstance(ranked, Tensor) else ranked)
    if found.ndim != 2 or found.dtype.kind not in "iu" or 0 in found.shape:
        raise ValueError(f"ranked must be (q, m), one list of places a query, got {found.dtype} of shape {found.shape}")
    if (found < 0).any():
        raise ValueError(f"ranked must hold places from 0 on, got {found.min()}")
    ordered = np.sort(found, 1)
    if (twice := np.argwhere(ordered[:, 1:] == ordered[:, :-1])).size:
        row, place = twice[0]
        raise ValueError(f"ranked must name an item once, got {ordered[row, place]} twice in row {row}")
    return found


def _places(name: str, given: Any, lists: Int[np.ndarray, "q m"]) -> list[Int[np.ndarray, " some"]]:
    """For each query its places, each once."""
    queries, highest = len(lists), lists.max()
    told = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
    if not hasattr(told, "__len__") or len(told) != queries:
        count = len(told) if hasattr(told, "__len__") else type(told).__name__
        raise ValueError(f"{name} must say for each of {queries} queries which items are, got {count}")
    found = []
    for number, one in enumerate(told):
        row = np.asarray(one)
        if row.dtype == bool and row.ndim == 1:
            if len(row) <= highest:
                raise ValueError(f"{name} must say of every item, and lists name item {highest}, got {len(row)} items")
            row = np.flatnonzero(row)
        if row.ndim != 1 or (row.size and (row.dtype.kind not in "iu" or row.min() < 0)):
            raise ValueError(
                f"{name} must be places from 0 on, or a boolean for every item, got {one!r:.60} for query {number}"
            )
        found.append(np.unique(row).astype(np.int64))
    return found
