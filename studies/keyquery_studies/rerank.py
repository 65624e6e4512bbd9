"""Study `rerank`: learned compared with training-free re-ranking of the first of a list.

Networks learn from half of the classes of a dataset and are tried on the other half, beside affinities alone, expanded
queries, k-reciprocal neighbours and diffusion. Other kernels, whole databases and timings were run at commit 7792c819.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped

from keyquery.learn.inputs.vectors import asked_of
from keyquery.learn.rankings.rankings import score_rankings
from keyquery.learn.rerank.base import AffinityReranker, AlphaQueryExpansion, ListReranker, search
from keyquery.learn.rerank.diffusion import DiffusionReranker
from keyquery.learn.rerank.k_reciprocal import KReciprocalReranker
from keyquery.learn.rerank.learned import Reranker
from keyquery.support.files import write_all
from keyquery_studies.common.comparisons import corrected, difference
from keyquery_studies.common.embeddings import digit_vectors, passages, text_vectors
from keyquery_studies.common.rows import Row, over_seeds
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.show import lines as lines
from keyquery_studies.common.store import array_file, digest_of, npz_bytes
from keyquery_studies.common.study import Rows, Study, StudyReading, Train, Trial, option

METHODS = ("first round", "affinity", "expansion", "reciprocal", "diffusion", "learned, general")
PLACE = ("dataset", "digest", "top", "anchors", "width", "steps")  # what has a first round of its own
HEAD, MOST_HEADS = 16, 12  # the width of a head in narrow networks, and how many there are in wide ones
SHARE = 0.2  # share of the test items that are queries


@dataclass(frozen=True, kw_only=True)
class RerankStudy(StudyReading, kind="rerank study"):
    """Average precision per method; a method's scope is "top", or "whole" for the entire database re-ranked."""

    rows: Sequence[Mapping[str, Any]]  # one per dataset, method, scope and seed

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds; `gain` is mAP minus that of the first-stage ranking of the same seed."""
        base = {_place(row): row["average_precision"] for row in self.rows if row["scope"] is None}
        rows = [{**row, "gain": row["average_precision"] - base[_place(row)]} for row in self.rows]
        return over_seeds(rows, (*PLACE, "method", "scope"), ("average_precision", "ndcg@10", "gain"))

    def contrasts(self) -> list[dict[str, Any]]:
        """Mean average precision of the first K, paired by seed, on every dataset and for every K; p by Holm over all.

        The learned re-ranker (`general`) minus each training-free method, and k-reciprocal minus the first ranking.
        """
        rows = []
        for dataset, top in dict.fromkeys((row["dataset"], row["top"]) for row in self.rows):
            arms: dict[str, list[Row]] = {}
            for row in self.rows:
                if (row["dataset"], row["top"]) == (dataset, top) and row["scope"] in ("top", None):
                    arms.setdefault(row["method"], []).append(row)
            pairs = [("learned, general", method) for method in arms if not method.startswith("learned")]
            for one, other in (*pairs, ("reciprocal", "first round")):
                change = difference(arms[one], arms[other], "average_precision")
                rows.append({"dataset": dataset, "top": top, "arm": one, "less": other, **change})
        return corrected(rows)


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*PLACE, "seed"))


@dataclass(frozen=True, kw_only=True)
class RerankTrial(Trial):
    """One method on one split of one dataset: half of the classes to learn from, drawn by the seed."""

    dataset: str
    digest: str
    method: str
    seed: int
    top: int
    anchors: int
    width: int
    steps: int

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train if the method is learned, re-rank the lists, and score them."""
        with np.load(folder / array_file(self.dataset, self.digest), allow_pickle=False) as arrays:
            features, labels = arrays["features"], arrays["labels"]
        learned, queries, database = split(labels, self.seed)
        asked = asked_of(features[queries], features[database], device)
        lists = search(*asked, len(database))
        if self.method != "first round":
            model = self.model(device, min(self.top, len(database)))
            fitted = model.fit(features[learned], labels[learned]) if isinstance(model, Reranker) else model
            lists = torch.as_tensor(fitted.rerank_lists(*asked, lists)[0])
        relevant = [np.flatnonzero(labels[database] == label) for label in labels[queries]]
        scores = score_rankings(lists, relevant, None, (10,)).mean
        facts = {"scope": None if self.method == "first round" else "top", "device": device_name(device)}
        return {**self.settings(), **facts, **{name: scores[name] for name in ("average_precision", "ndcg@10")}}

    def model(self, device: str, top: int) -> ListReranker:
        """The re-ranker of the method."""
        anchors, heads = min(self.anchors, top + 1), min(max(self.width // HEAD, 1), MOST_HEADS)
        sizes: dict[str, Any] = {"anchors": anchors, "width": self.width, "steps": self.steps, "heads": heads}
        k = KReciprocalReranker()
        neighbours, smoothing = min(k.neighbours, top), min(k.smoothing, top)
        models: dict[str, Callable[..., ListReranker]] = {
            "learned, general": partial(Reranker, top, kernel="general", random_state=self.seed, **sizes),
            "affinity": partial(AffinityReranker, top, anchors),
            "reciprocal": partial(KReciprocalReranker, top, neighbours, smoothing),
            "expansion": partial(AlphaQueryExpansion, top),
            "diffusion": partial(DiffusionReranker, top),
        }
        return models[self.method](device=device)


def split(labels: Shaped[np.ndarray, " n"], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items to learn from, queries and database: half of the classes, a fifth and four fifths of the other half."""
    classes = np.unique(labels)
    if len(classes) < 4:
        raise ValueError(f"labels must have 4 classes or more, half of them for training, got {len(classes)}")
    rng = np.random.default_rng(seed)
    learned = np.isin(labels, rng.permutation(classes)[: len(classes) // 2])
    rest = rng.permutation(np.flatnonzero(~learned))
    count = max(round(SHARE * len(rest)), 1)
    return np.flatnonzero(learned), rest[:count], np.sort(rest[count:])


@dataclass(frozen=True, kw_only=True)
class Rerank(Study):
    """What is learned re-ranking worth, compared with training-free re-ranking?

    Networks are trained on half of the classes and tested on the other half, against plain affinities, query expansion,
    k-reciprocal neighbours and diffusion. A minute per training run on one core; embedding takes longer.
    """

    result = RerankStudy

    digits: bool = option(False, "Use the digits of scikit-learn, by DINOv2.")
    weights: Path | None = option(None, "DINOv2 weights for --digits: a .safetensors file with transformers' names.")
    texts: Path | None = option(None, "A text of several works separated by form feeds, plain or compressed.")
    encoder: Path | None = option(None, "A folder with a sentence encoder, for --texts.")
    seeds: tuple[int, ...] = option((0, 1, 2), "A seed, of classes and queries.", "seed")
    items: int = option(3000, "Maximum number of passages.", least=8)
    top: int = option(128, "Number of items of each list to re-rank.", least=2)
    anchors: int = option(128, "Number of top items that all are compared with.", least=2)
    width: int = option(64, "Width of the networks.", least=8)
    steps: int = option(200, "Training steps.", least=1)

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """Facts of every dataset, whose vectors are cached in `folder`; they are computed once."""
        vectors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if self.digits:
            vectors["digits"] = digit_vectors(_given("weights", self.weights))
        if self.texts is not None:
            for name, (texts, labels) in passages(self.texts, self.items).items():
                vectors[name] = text_vectors(texts, _given("encoder", self.encoder)), labels
        if not vectors:
            raise ValueError("pass at least one of digits and texts")
        facts, contents = {}, dict[str | Path, str | bytes]()
        for name, (features, labels) in vectors.items():
            digest = digest_of(features, labels)
            arrays = {"features": features.astype(np.float32), "labels": labels}
            contents[folder / array_file(name, digest)] = npz_bytes(arrays, compressed=False)
            facts[name] = {"digest": digest, "items": len(labels), "classes": len(np.unique(labels))}
        folder.mkdir(parents=True, exist_ok=True)
        write_all(contents)
        return {"sets": facts}

    def rows(self, facts: Mapping[str, Any], train: Train) -> Rows:
        """Every method on every dataset."""
        sizes: dict[str, Any] = {"top": self.top, "anchors": self.anchors, "width": self.width, "steps": self.steps}
        trials = [
            RerankTrial(dataset=name, digest=about["digest"], method=method, seed=seed, **sizes)
            for seed in self.seeds
            for name, about in facts["sets"].items()
            for method in METHODS
        ]
        return {"rows": train(trials)}


def _given(name: str, path: Path | None) -> Path:
    if path is None:
        raise ValueError(f"{name} (--{name}) must be given, for the model that embeds")
    return path
