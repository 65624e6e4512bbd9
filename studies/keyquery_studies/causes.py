"""Study `causes`: are explanations along the causal graph of attention smaller or cheaper than by other orders?

A small Transformer tells whether a review praises; words of unseen reviews are masked until its prediction changes. The
purchases of the published reading, in which a set also tells what comes in place, were run at commit 7792c819.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.layers import Encoder
from keyquery.learn.causes.causes import causes
from keyquery.learn.causes.explain import explain
from keyquery.learn.data import read_column
from keyquery.learn.training import Recipe, train
from keyquery.listening import attention_maps
from keyquery.support.files import write_all
from keyquery.support.statistics import Interval, paired
from keyquery_studies.common.rows import grouped
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.show import lines as lines
from keyquery_studies.common.store import array_file, digest_of, npz_bytes
from keyquery_studies.common.study import Rows, Study, StudyReading, Train, Trial, option

PADDING, BLANK, RARE, FIRST = 0, 1, 2, 3  # ids of tokens; words begin at FIRST
LEARN, CHOOSE, TEST = 0, 1, 2  # the split of a review
WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[!?]")
LENGTH, LEAST = 128, 5  # tokens of a review, the masked first one included; reviews in which a word occurs
HELD_OUT = 0.1  # validation share of the training data
NODES, LARGEST, CALLS = 30, 3, 500  # words that receive most attention; largest set, and queries before giving up
WIDTH, DEPTH, HEADS, BATCH, DROPOUT, MASKED = 64, 2, 4, 64, 0.3, 0.8
KEYS = ("application", "order", "search")


@dataclass(frozen=True, kw_only=True)
class CausesStudy(StudyReading, kind="causes study"):
    """What it took to change each prediction, and the accuracy of the models."""

    models: Sequence[Mapping[str, Any]]  # one per training
    rows: Sequence[Mapping[str, Any]]  # one per prediction; `found` by order and search: size, and model queries

    def records(self) -> list[dict[str, Any]]:
        """One row per prediction, order and search; a size of None: no set was found."""
        rows = []
        for row in self.rows:
            same = {key: value for key, value in row.items() if key != "found"}
            for name, (size, calls, *_) in row["found"].items():
                order, search = name.split()
                rows.append({**same, "order": order, "search": search, "size": size, "calls": calls})
        return rows

    def summary(self) -> list[dict[str, Any]]:
        """One row per order and search: share of predictions changed, medians of set sizes and of queries.

        `fewer` is how many queries the causal graph saves, prediction by prediction, where both found a set.
        """
        groups, summary = grouped(self.records(), KEYS), []
        for key, rows in groups.items():
            hits = [row["size"] for row in rows if row["size"] is not None]
            graph = groups[key[0], "causes", key[2]]
            pairs = zip(graph, rows, strict=True)
            both = [(a["calls"], b["calls"]) for a, b in pairs if None not in (a["size"], b["size"])]
            means: dict[str, Any] = {**dict(zip(KEYS, key, strict=True)), "predictions": len(rows)}
            means["found"] = _interval([(0.0, float(row["size"] is not None)) for row in rows])
            means |= {"size_median": median(hits) if hits else None, "calls_median": median(r["calls"] for r in rows)}
            means |= {"fewer": _interval(both), "fewer_median": median(b - a for a, b in both) if both else None}
            summary.append({**means, "compared": len(both)})
        return summary


def _interval(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    return paired(*torch.tensor(pairs, dtype=torch.float64).unbind(1)) if len(pairs) > 1 else None


def reviews(path: str | Path) -> dict[str, np.ndarray]:
    """A .tsv file with columns split, label (0 or 1) and text: a masked token, then the last 127 words of a review."""
    splits, labels, texts = (read_column(path, column) for column in ("split", "label", "text"))
    if not set(labels) <= {"0", "1"}:
        raise ValueError(f"{path}: label must be 0 or 1, got {', '.join(sorted(set(labels))[:4])}")
    rows = [WORD.findall(text.lower().replace("<br />", " "))[1 - LENGTH :] for text in texts]
    learned = np.array(splits) == "train"
    counts = Counter(word for row, of in zip(rows, learned, strict=True) if of for word in set(row))
    known = sorted((word for word in counts if counts[word] >= LEAST), key=lambda word: (-counts[word], word))
    numbers = {word: id for id, word in enumerate(known, FIRST)}
    ids = np.full((len(rows), LENGTH), PADDING, np.int64)
    ids[:, 0] = BLANK
    for line, row in zip(ids, rows, strict=True):
        line[1 : len(row) + 1] = [numbers.get(word, RARE) for word in row]
    parts = np.where(learned, LEARN, TEST)
    able = np.random.default_rng(0).permutation(np.nonzero(learned)[0])
    parts[able[: round(HELD_OUT * len(able))]] = CHOOSE
    return {"ids": ids, "answers": np.array(labels, np.int64), "parts": parts, "words": np.array(len(known) + FIRST)}


class ReviewModel(nn.Module):
    """Logits of "negative" and "positive" at the masked first token of a review."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.tokens, self.places, self.answers = (nn.Embedding(count, WIDTH) for count in (words, LENGTH, 2))
        self.body, self.dropout = Encoder(WIDTH, DEPTH, HEADS, dropout=DROPOUT), nn.Dropout(DROPOUT)
        for embedding in (self.tokens, self.places, self.answers):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Int[Tensor, "batch n"]) -> Float[Tensor, "batch two"]:
        """Logits from token ids."""
        return self.logits(self.tokens(ids), ids != PADDING)

    def logits(self, vectors: Float[Tensor, "batch n d"], mask: Bool[Tensor, "batch n"]) -> Float[Tensor, "batch two"]:
        """Logits from token embeddings."""
        output = self.body(self.dropout(vectors + self.places.weight[: vectors.shape[1]]), mask)
        return output[:, 0] @ self.answers.weight.mT


def hide(ids: Int[Tensor, "batch n"], generator: torch.Generator) -> Int[Tensor, "batch n"]:
    """Mask a random share of each review: a model that never saw a masked token would answer to the masking."""
    shares = MASKED * torch.rand(len(ids), 1, generator=generator)
    return ids.masked_fill((torch.rand(ids.shape, generator=generator) < shares) & (ids > BLANK), BLANK)


class Queries:
    """The predictions of a model for one review with some words masked; each set is asked for once."""

    def __init__(self, model: nn.Module, ids: Int[Tensor, " n"]) -> None:
        self.model, self.ids, self.known = model, ids, dict[frozenset[int], int]()
        self.before = self.ask([()])[0]

    @torch.no_grad()
    def ask(self, sets: Iterable[Iterable[int]]) -> list[int]:
        """The predictions for all sets, in one batch."""
        asked = [frozenset(hidden) for hidden in sets]
        if new := [hidden for hidden in dict.fromkeys(asked) if hidden not in self.known]:
            ids = self.ids.repeat(len(new), 1)
            for row, hidden in zip(ids, new, strict=True):
                row[list(hidden)] = BLANK
            self.known |= dict(zip(new, self.model(ids).argmax(1).tolist(), strict=True))
        return [self.known[hidden] for hidden in asked]

    def changed(self, hidden: Iterable[int], target: int = 0) -> bool:
        """Whether masking a set changes the prediction."""
        return self.ask([hidden])[0] != self.before

    def first(self, sets: Iterable[tuple[int, ...]], most: int | None = None) -> tuple[int | None, int]:
        """The size of the first set that changes the prediction, and its number, which is how often to ask."""
        calls, rest = 0, islice(sets, most)
        while some := list(islice(rest, 32)):
            changed = [after != self.before for after in self.ask(some)]
            if any(changed):
                return len(some[changed.index(True)]), calls + changed.index(True) + 1
            calls += len(some)
        return None, calls


def subsets(order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All sets, by size, then by the order of their members."""
    for size in range(1, LARGEST + 1):
        for members in sorted(combinations(range(len(order)), size), key=lambda some: (sum(some), some)):
            yield tuple(order[member] for member in members)


def prefixes(order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The first word, the first two, and so on."""
    return (tuple(order[:size]) for size in range(1, len(order) + 1))


def sensitivity(model: ReviewModel, ids: Int[Tensor, " n"], choice: int) -> Float[Tensor, " n"]:
    """Gradient × input: Σ_d x_d ∂logit/∂x_d of each word for one prediction."""
    vectors = model.tokens(ids.unsqueeze(0)).detach().requires_grad_()
    logit = model.logits(vectors, torch.ones_like(ids).bool().unsqueeze(0))[0, choice]
    return (vectors * torch.autograd.grad(logit, vectors)[0]).detach()[0].sum(-1)


def explained(model: ReviewModel, ids: Int[Tensor, " n"], seed: int) -> dict[str, tuple[int | None, int]]:
    """One review by every order and search: size of the set, and model queries."""
    ids = ids[ids != PADDING]
    queries, maps = Queries(model, ids), attention_maps(model, {"ids": ids.unsqueeze(0)})[-1][0]
    nodes = (1 + maps[:, 0].mean(0)[1:].argsort(descending=True, stable=True)[:NODES]).tolist()
    gradient = sensitivity(model, ids, queries.before)
    shuffled = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(seed)).tolist()
    orders = {
        "attention": nodes,
        "gradient": sorted(nodes, key=lambda node: -float(gradient[node])),
        "place": sorted(nodes),
        "random": [nodes[index] for index in shuffled],
    }
    graph = causes(maps, nodes=[0, *nodes], samples=WIDTH)
    explanation = explain(graph, 0, queries.changed, largest=LARGEST, calls=CALLS, every=False)
    size = len(explanation.sets[0]) if explanation.sets else None
    results = {"causes sets": (size, explanation.calls), "causes prefix": queries.first(prefixes(explanation.pool))}
    for name, order in orders.items():
        results[f"{name} sets"] = queries.first(subsets(order), CALLS)
        results[f"{name} prefix"] = queries.first(prefixes(order))
    return results


@dataclass(frozen=True, kw_only=True)
class ReviewTrial(Trial):
    """Train one model, then explain its predictions."""

    digest: str
    seed: int
    steps: int
    count: int

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, test, explain."""
        with np.load(folder / array_file("reviews", self.digest), allow_pickle=False) as arrays:
            ids, answers, parts = (torch.from_numpy(arrays[name]) for name in ("ids", "answers", "parts"))
            words = int(arrays["words"])
        torch.manual_seed(self.seed)
        model = ReviewModel(words).to(device)
        learned, held = (torch.nonzero(parts == part)[:, 0] for part in (LEARN, CHOOSE))

        def draw(step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            rows = learned[torch.randint(len(learned), (BATCH,), generator=generator)]
            return hide(ids[rows], generator).to(device), answers[rows].to(device)

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return cross_entropy(model(batch[0]).float(), batch[1])

        def validate(model: nn.Module) -> float:
            return float(sum(loss(model, (ids[r].to(device), answers[r].to(device))) * len(r) for r in held.split(250)))

        options: dict[str, Any] = {
            "warmup": min(200, self.steps),
            "weight_decay": 0.1,
            "check_every": max(self.steps // 10, 1),
        }
        train(model, draw, loss, Recipe(self.steps, lr=2e-3, seed=self.seed, **options), validate=validate)
        tested = torch.nonzero(parts == TEST)[:, 0]
        drawn = torch.randperm(len(tested), generator=torch.Generator().manual_seed(1000 + self.seed))[: self.count]
        facts, rows = {"application": "sentiment", "seed": self.seed}, []
        for number in drawn.tolist():
            found = explained(model, ids[tested[number]].to(device), number)
            rows.append({**facts, "sequence": number, "found": found})
        return {**self.settings(), **facts, "device": device_name(device), "rows": rows}


@dataclass(frozen=True, kw_only=True)
class Causes(Study):
    """Does the causal graph of attention give shorter or cheaper explanations than other token orders?

    A small Transformer is trained on review sentiment. Then words are masked until the prediction changes, in the order
    of the graph, attention, gradient × input, position, or at random. Ten minutes per training run on one core.
    """

    result = CausesStudy

    reviews: Path = option(help="A .tsv with columns split, label (0 or 1) and text.")
    seeds: tuple[int, ...] = option((0, 1, 2), "A seed.", "seed")
    count: int = option(200, "Number of predictions to explain per trained model.", least=2)
    steps: int = option(500, "Training steps.", least=1)

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """Keep the encoded reviews in `folder`."""
        arrays = reviews(self.reviews)
        digest = digest_of(*arrays.values())
        folder.mkdir(parents=True, exist_ok=True)
        write_all({folder / array_file("reviews", digest): npz_bytes(arrays)})
        return {"digest": digest, "sequences": np.bincount(arrays["parts"]).tolist()}

    def rows(self, facts: Mapping[str, Any], train: Train) -> Rows:
        """One model per seed, and its explanations."""
        sizes = {"steps": self.steps, "count": self.count}
        models = train([ReviewTrial(digest=facts["digest"], seed=seed, **sizes) for seed in self.seeds])
        return {"rows": [row for model in models for row in model.pop("rows")], "models": models}
