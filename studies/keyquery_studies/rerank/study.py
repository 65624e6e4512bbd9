"""Study `rerank`: learned compared with training-free re-ranking.

Networks learn from half of the classes of a set and are tried on the other half, beside affinities alone, expanded
queries, k-reciprocal neighbours and diffusion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from keyquery.learn.inputs.vectors import Asked, asked_of
from keyquery.learn.rankings.rankings import score_rankings, score_revisited
from keyquery.learn.rerank.base import AffinityReranker, AlphaQueryExpansion, ListReranker, by_score
from keyquery.learn.rerank.diffusion import DiffusionReranker
from keyquery.learn.rerank.k_reciprocal import KReciprocalReranker
from keyquery.learn.rerank.learned import Reranker
from keyquery.learn.rerank.search import search
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.comparisons import corrected, difference
from keyquery_studies.common.rows import firsts, over_seeds
from keyquery_studies.common.runner import device_name, run_jobs, study_folder
from keyquery_studies.common.store import result_name
from keyquery_studies.rerank.datasets import Sources, Split, load_split, prepare

KERNELS = ("general", "psd", "symmetric")
LEARNED = tuple(f"learned, {kernel}" for kernel in KERNELS)
METHODS = ("first round", "affinity", "expansion", "reciprocal", "diffusion", *LEARNED)
WHOLE = ("expansion", "reciprocal", "diffusion")  # which can order the whole database, too
HEAD, MOST_HEADS = 16, 12  # the width of a head in narrow networks, and how many there are in wide ones
SIZES = ("top", "anchors", "width", "steps")
PLACE = ("dataset", "digest", *SIZES)  # what has a first round of its own
SETTING = (*PLACE, "method", "scope")
CLOCKED = ("ms", "graph_s", "learn_s")
FIGURES = ("average_precision", "ndcg@10", "medium", "hard", "ms")


@dataclass(frozen=True, kw_only=True)
class RerankStudy(Reading, kind="rerank study"):
    """Ranking quality per method: `average_precision` is standard; `medium` and `hard` are trapezoidal.

    A method's scope is "top", the head of a list re-ranked, or "whole", the entire database re-ranked.
    """

    rows: Sequence[Mapping[str, Any]]  # one per dataset, method and seed

    def records(self) -> list[dict[str, Any]]:
        """One row per dataset, method, scope and seed."""
        return [dict(row) for row in self.rows]

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds; `gain` is mAP minus that of the first-stage ranking of the same seed.

        Runs of other sizes, or on other vectors, are never mixed.
        """
        place = itemgetter(*PLACE, "seed")
        base = {place(row): row["average_precision"] for row in self.rows if row["scope"] is None}
        rows = [{**row, "gain": row["average_precision"] - base[place(row)]} for row in self.rows if place(row) in base]
        return over_seeds(rows, SETTING, (*FIGURES, "gain"))

    def contrasts(self) -> list[dict[str, Any]]:
        """Mean average precision of the first K, paired by seed, on every dataset and for every K; p by Holm over all.

        The learned re-ranker (`general`) less each training-free method, and k-reciprocal less the first ranking.
        """
        rows = []
        for dataset, top in dict.fromkeys((row["dataset"], row["top"]) for row in self.rows):
            arms: dict[str, list[Mapping[str, Any]]] = {}
            for row in self.rows:
                if (row["dataset"], row["top"]) == (dataset, top) and row["scope"] in ("top", None):
                    arms.setdefault(row["method"], []).append(row)
            pairs = [("learned, general", method) for method in arms if not method.startswith("learned")]
            for one, other in (*pairs, ("reciprocal", "first round")):
                if one in arms and other in arms:
                    found = difference(arms[one], arms[other], "average_precision")
                    rows.append({"dataset": dataset, "top": top, "arm": one, "less": other, **found})
        return corrected(rows)

    @classmethod
    def joined(cls, *parts: RerankStudy) -> RerankStudy:
        """One reading of separate runs."""
        rows = firsts((row for part in parts for row in part.rows), (*SETTING, "seed"))
        return cls(rows=rows, provenance={"runs": [part.provenance for part in parts]})


@dataclass(frozen=True, kw_only=True)
class RerankTrial:
    """One method on one split of one dataset."""

    dataset: str
    digest: str
    method: str
    seed: int
    top: int = 128
    anchors: int = 128
    width: int = 64
    steps: int = 400
    shared: bool = False  # whether other workers run at the same time: then timings are meaningless

    @property
    def name(self) -> str:
        """The name of its result file."""
        own = asdict(self) if self.method in LEARNED else {**asdict(self), "width": 0, "steps": 0}
        del own["shared"]
        return result_name((self.dataset, self.method.replace(",", ""), self.seed), own)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train if the method is learned, re-rank the lists, and score them."""
        data = _load(folder, self.dataset, self.digest, self.seed)
        asked = asked_of(data.queries, data.database, device)
        first = search(*asked, len(asked.database))
        top = min(self.top, len(asked.database))
        start = perf_counter()
        model = self._model(data, device, top)
        learned = perf_counter() - start if self.method in LEARNED else None
        facts: dict[str, Any] = {"learn_s": learned, "device": device_name(device), "queries": len(asked.queries)}
        facts |= {"database": len(asked.database), "learned_from": len(data.features)}
        timed: list[tuple[str | None, dict[str, Any]]] = []
        if model is None:
            taken, _ = _clocked(lambda: search(*asked, top), asked)
            timed.append((None, {"lists": first, "ms": 1000 * taken / len(first), "graph_s": None}))
        else:
            timed.append(("top", _timed(model, asked, first, top)))
            if self.method in WHOLE:
                timed.append(("whole", _timed(model, asked, first, first.shape[1])))
        no_timings = dict.fromkeys(CLOCKED) if self.shared else {}
        rows = [{**self._row(data, scope, metrics), **no_timings} for scope, metrics in timed]
        return {**asdict(self), **facts, **no_timings, "rows": rows}

    def _model(self, data: Split, device: str, top: int) -> ListReranker | None:
        if self.method in LEARNED:
            kernel = self.method.removeprefix("learned, ")
            sizes: dict[str, Any] = {"anchors": min(self.anchors, top + 1), "width": self.width, "steps": self.steps}
            heads = min(max(self.width // HEAD, 1), MOST_HEADS)
            reranker = Reranker(top, heads=heads, kernel=kernel, random_state=self.seed, device=device, **sizes)
            return reranker.fit(data.features, data.labels)
        if self.method == "affinity":
            return AffinityReranker(top, min(self.anchors, top + 1), device)
        if self.method == "reciprocal":
            usual = KReciprocalReranker()
            return KReciprocalReranker(top, min(usual.neighbours, top), min(usual.smoothing, top), device=device)
        plain: dict[str, Callable[..., ListReranker]] = {
            "expansion": AlphaQueryExpansion,
            "diffusion": DiffusionReranker,
        }
        return plain[self.method](top, device=device) if self.method in plain else None

    def _row(self, data: Split, scope: str | None, metrics: dict[str, Any]) -> dict[str, Any]:
        lists = metrics.pop("lists")
        mean = score_rankings(lists, data.relevant, None if data.truth is None else data.truth.junk, (10,)).mean
        setups = {} if data.truth is None else score_revisited(lists, data.truth, (10,))
        hard = {name: setups[name].mean["trapezoidal_precision"] if setups else None for name in ("medium", "hard")}
        kept = {name: mean[name] for name in ("average_precision", "recall@10", "ndcg@10")}
        return {"scope": scope, **kept, **hard, **metrics}


def _timed(model: Any, asked: Asked, lists: Tensor, top: int) -> dict[str, Any]:
    """Lists in their new order, the milliseconds that took a query, and the seconds that a database's graph takes."""
    seconds, graph = _clocked(lambda: model._graph(asked.database), asked) if hasattr(model, "_graph") else (None, None)

    def scored() -> tuple[Tensor, Tensor]:
        if isinstance(model, AlphaQueryExpansion) and top == lists.shape[1]:
            return model._reranked(asked, top, None)  # a search, which is faster than lists of everything
        scores = (
            model._scores(asked, lists[:, :top])
            if graph is None
            else model._by_graph(asked, lists[:, :top], graph, top)
        )
        return by_score(lists, scores)

    scored()  # the first time is slower than all others
    taken, (ranked, _) = _clocked(scored, asked)
    return {"lists": ranked, "ms": 1000 * taken / len(lists), "graph_s": seconds}


def _clocked(work: Callable[[], Any], asked: Asked) -> tuple[float, Any]:
    _wait(asked)
    start = perf_counter()
    result = work()
    _wait(asked)
    return perf_counter() - start, result


def _wait(asked: Asked) -> None:
    if asked.queries.is_cuda:
        torch.cuda.synchronize()


@lru_cache(maxsize=2)
def _load(folder: Path, dataset: str, digest: str, seed: int) -> Split:
    return load_split(folder, dataset, digest, seed)


def run(
    sources: Sources,
    out: str | Path | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    top: int = 128,
    anchors: int = 128,
    width: int = 64,
    steps: int = 400,
    device: str = "auto",
    workers: int = 1,
    progress: Progress | None = None,
) -> RerankStudy:
    """Run every method on every dataset, and compare.

    With `out`, embeddings and every result are kept there, and nothing is computed twice. The `top` of each list are
    re-ranked; networks see `anchors` of them. Seeds draw the training classes and the queries. With several `workers`,
    timings are left out, since they would affect each other.

    Parameters
    ----------
    sources
        The datasets.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    seeds
        Draw the training classes and the queries.
    top, anchors
        Re-ranked candidates per list, and how many a network sees. Default: 128, 128.
    width, steps
        Of the networks and their training. Default: 64, 400.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    RerankStudy
        A Reading.
    """
    for name, value in (("top", top), ("anchors", anchors), ("width", width), ("steps", steps), ("workers", workers)):
        check_count(name, value)
    chosen = pick_device(device)
    sizes: dict[str, Any] = {"top": top, "anchors": anchors, "width": width, "steps": steps}
    with study_folder(out) as folder:
        facts = prepare(sources, folder, chosen, progress)
        trials = [
            RerankTrial(
                dataset=dataset,
                digest=facts[dataset]["digest"],
                method=method,
                seed=seed,
                shared=workers > 1,
                **sizes,
            )
            for seed in dict.fromkeys(seeds)
            for dataset in facts
            for method in METHODS
        ]
        results = run_jobs(trials, folder, chosen, workers, progress)
    rows = [{**result, **row} for result in results for row in result.pop("rows")]
    return RerankStudy(rows=rows, provenance=provenance(sets=facts, **sizes, device=device_name(chosen)))
