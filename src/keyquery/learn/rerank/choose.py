"""`choose_reranker`: the best training-free re-ranker for a database, by cross-validation over labelled queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from keyquery.learn.rankings.rankings import score_rankings
from keyquery.learn.rerank.base import AffinityReranker, AlphaQueryExpansion, ListReranker
from keyquery.learn.rerank.diffusion import DiffusionReranker
from keyquery.learn.rerank.k_reciprocal import KReciprocalReranker
from keyquery.support.checks import check_count


class ChosenReranker(NamedTuple):
    """The re-ranker with the highest mean average precision, fitted to the database, and the scores of all."""

    reranker: ListReranker
    scores: Sequence[Mapping[str, Any]]  # `reranker` and its `average_precision`, the mean over queries, best first
    before: float  # mean average precision of the first ranking
    cross_validated: float  # of the re-ranker that is best on the other queries, so that choosing does not flatter


def choose_reranker(
    queries: Any, database: Any, relevant: Any, *, top: int | None = None, folds: int = 5, device: Any = "auto"
) -> ChosenReranker:
    """Choose among the training-free re-rankers and their few settings, on queries whose relevant items are known.

    Parameters
    ----------
    queries
        Vectors (q, dim), at least as many as `folds`.
    database
        Vectors (n, dim).
    relevant
        Per query the indices of its relevant items, or a boolean array (q, n).
    top
        Candidates per query that are re-ranked. Default: 1024, or all if there are fewer.
    folds
        Of the queries. Default: 5.
    device
        Default: "auto", a GPU if there is one.

    Returns
    -------
    ChosenReranker
        `reranker`, fitted to the database; the `scores` of all; the score `before` re-ranking; and the
        `cross_validated` score of choosing. Do not re-rank if that is not above the score before.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> labels = torch.arange(160) % 8
    >>> vectors = torch.randn(8, 16)[labels] + torch.randn(160, 16)
    >>> chosen = kq.choose_reranker(vectors[:40], vectors[40:], labels[:40, None] == labels[40:])
    >>> chosen.cross_validated > chosen.before
    True
    """
    check_count("folds", folds, least=2)
    candidates = _candidates(top, device)
    before, _, _ = candidates[0].before_and_after(queries, database)
    first = _precisions(before, relevant)
    known = ~np.isnan(first)
    if known.sum() < folds:
        raise ValueError(f"{folds} folds need as many queries with relevant items, got {known.sum()}")
    lists = [model.fit(database).rerank(queries)[0] for model in candidates]
    precisions = np.stack([_precisions(ranked, relevant)[known] for ranked in lists])
    fold = np.arange(precisions.shape[1]) % folds
    honest = np.empty(precisions.shape[1])
    for number in range(folds):
        best = precisions[:, fold != number].mean(1).argmax()
        honest[fold == number] = precisions[best, fold == number]
    means = precisions.mean(1)
    order = np.argsort(-means, kind="stable")
    scores = [{"reranker": repr(candidates[i]), "average_precision": float(means[i])} for i in order]
    return ChosenReranker(candidates[order[0]], scores, float(first[known].mean()), float(honest.mean()))


def _candidates(top: int | None, device: Any) -> list[ListReranker]:
    return [
        *(AlphaQueryExpansion(top, neighbours=count, device=device) for count in (2, 5, 10)),
        *(KReciprocalReranker(top, neighbours=count, device=device) for count in (10, 20, 40)),
        *(DiffusionReranker(top, neighbours=count, device=device) for count in (5, 20, 50)),
        AffinityReranker(top, device=device),
    ]


def _precisions(lists: Any, relevant: Any) -> Float64[np.ndarray, " q"]:
    """Average precision per query, NaN where nothing is relevant."""
    rows = score_rankings(lists, relevant, at=()).rows
    return np.array([row["average_precision"] for row in rows], dtype=np.float64)
