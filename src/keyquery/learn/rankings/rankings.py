"""`score_rankings`: standard retrieval metrics of ranked lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int
from torch import Tensor

from keyquery.learn.data.retrieval import SETUPS, Revisited
from keyquery.reading import Reading, digest, provenance
from keyquery.support.checks import check_count


@dataclass(frozen=True, kw_only=True, repr=False)
class RankingScores(Reading, kind="ranking scores"):
    """Retrieval metrics per query; queries without relevant items are excluded from all means."""

    units: ClassVar[Mapping[str, str]] = {
        "average_precision": "mean over relevant items of the precision at their rank",
        "trapezoidal_precision": "area under precision over recall, trapezoidal, as in the revisited Oxford protocol",
        "recall": "share of the relevant items among the first k",
        "ndcg": "discounted cumulative gain of the first k, relative to the ideal ranking",
    }

    at: Sequence[int]  # the k of recall and ndcg
    rows: Sequence[Mapping[str, Any]]  # one per query

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {value:.4f}" for name, value in self.mean.items())
        return f"RankingScores({len(self.scored)} queries: {means})"

    @property
    def scored(self) -> list[Mapping[str, Any]]:
        """Rows of queries with at least one relevant item."""
        return [row for row in self.rows if row["relevant"]]

    @property
    def mean(self) -> dict[str, float]:
        """The mean of every metric over queries; that of `average_precision` is mAP."""
        names = [name for name in self.rows[0] if name not in ("query", "relevant")]
        return {name: float(np.mean([row[name] for row in self.scored])) for name in names} if self.scored else {}

    def records(self) -> list[dict[str, Any]]:
        """One row per query."""
        return [dict(row) for row in self.rows]


def score_rankings(ranked: Any, relevant: Any, junk: Any = None, at: Sequence[int] = (1, 10, 100)) -> RankingScores:
    """Score ranked lists by average precision, recall@k and nDCG@k.

    AP = (1/n) Σ_j (j + 1)/(ρ_j + 1), with ρ_j the rank of the j-th hit, both from 0, and n relevant items.

    Parameters
    ----------
    ranked
        Indices of database items, (queries, m), best first.
    relevant
        A boolean array (queries, database), or the indices of the relevant items for each query. Relevant items
        missing from a list count as not retrieved.
    junk
        Items to remove from the lists, neither right nor wrong; same format as `relevant`. Default: none.
    at
        The cutoffs k of recall and nDCG. Default: (1, 10, 100).

    Returns
    -------
    RankingScores
        Every metric per query; `.mean` averages over queries with relevant items.

    Examples
    --------
    >>> scores = kq.score_rankings([[3, 1, 0, 2]], relevant=[[3, 2]], at=(1,))
    >>> scores.mean["average_precision"], scores.mean["recall@1"]
    (0.75, 0.5)
    """
    lists = _lists(ranked)
    for k in at:
        check_count("a k of at", k)
    relevant_items = _indices("relevant", relevant, lists)
    left_out = [np.empty(0, dtype=np.int64)] * len(lists) if junk is None else _indices("junk", junk, lists)
    rows = [
        {"query": number, **_measures(*query, at)}
        for number, query in enumerate(zip(lists, relevant_items, left_out, strict=True))
    ]
    return RankingScores(
        at=list(at), rows=rows, provenance=provenance(junk=junk is not None, tensors={"lists": digest(lists)})
    )


def score_revisited(ranked: Any, truth: Revisited, at: Sequence[int] = (1, 5, 10)) -> dict[str, RankingScores]:
    """Score rankings on ROxford or RParis under each setup; published numbers are means of `trapezoidal_precision`.

    Easy: easy items are relevant, hard ones are junk. Medium: both are relevant. Hard: easy ones are junk. `ranked` and
    `at` are as in `score_rankings`, `truth` is of `kq.data.load_revisited`.
    """
    return {name: score_rankings(ranked, *truth.setup(name), at) for name in SETUPS}


def _measures(
    ranked: Int[np.ndarray, " m"], relevant: Int[np.ndarray, " r"], junk: Int[np.ndarray, " j"], at: Iterable[int]
) -> dict[str, Any]:
    if (both := np.intersect1d(relevant, junk)).size:
        raise ValueError(f"an item must not be both relevant and junk, got {both[0]} in both")
    ranks = np.flatnonzero(np.isin(ranked[~np.isin(ranked, junk)], relevant))  # ρ_j of the j-th hit, from 0
    count, order = len(relevant), np.arange(len(ranks))
    precision = (order + 1) / (ranks + 1)
    before = np.where(ranks == 0, 1.0, order / np.maximum(ranks, 1))  # the precision one rank above
    metrics = {"average_precision": precision.sum(), "trapezoidal_precision": (before + precision).sum() / 2}
    for k in at:
        gains = 1 / np.log2(np.arange(max(count, len(ranked))) + 2)
        metrics[f"recall@{k}"] = (ranks < k).sum()
        metrics[f"ndcg@{k}"] = count * gains[ranks[ranks < k]].sum() / gains[: max(min(count, k), 1)].sum()
    return {"relevant": count, **{name: float(value / count) if count else None for name, value in metrics.items()}}


def _lists(ranked: Any) -> Int[np.ndarray, "q m"]:
    lists = np.asarray(ranked.detach().cpu() if isinstance(ranked, Tensor) else ranked)
    if lists.ndim != 2 or lists.dtype.kind not in "iu" or 0 in lists.shape or lists.min() < 0:
        raise ValueError(f"ranked must be (q, m), item indices from 0, got {lists.dtype} of shape {lists.shape}")
    ordered = np.sort(lists, 1)
    if (twice := np.argwhere(ordered[:, 1:] == ordered[:, :-1])).size:
        row, rank = twice[0]
        raise ValueError(f"ranked must contain each item once, got {ordered[row, rank]} twice in row {row}")
    return lists


def _indices(name: str, items: Any, lists: Int[np.ndarray, "q m"]) -> list[Int[np.ndarray, " some"]]:
    """Unique item indices per query."""
    queries, highest = len(lists), lists.max()
    per_query = items.detach().cpu().numpy() if isinstance(items, Tensor) else items
    count = len(per_query) if hasattr(per_query, "__len__") else type(per_query).__name__
    if count != queries:
        raise ValueError(f"{name} must have one entry for each of {queries} queries, got {count}")
    indices = []
    for number, entry in enumerate(per_query):
        row = np.asarray(entry)
        if row.dtype == bool and row.ndim == 1:
            if len(row) <= highest:
                raise ValueError(f"{name} must have a boolean for every item up to {highest}, got {len(row)}")
            row = np.flatnonzero(row)
        if row.ndim != 1 or (row.size and (row.dtype.kind not in "iu" or row.min() < 0)):
            raise ValueError(f"{name} must be indices ≥ 0 or booleans, got {entry!r:.60} for query {number}")
        indices.append(np.unique(row).astype(np.int64))
    return indices
