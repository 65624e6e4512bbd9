"""Study `causes`: are explanations along the causal graph of attention smaller or cheaper than by other orders?

Two small Transformers fill a blank: whether a review praises, and what a customer buys next. For predictions on
sequences never seen, words or items are hidden until another choice comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from keyquery.learn.training import Recipe
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.files import write_all
from keyquery.support.progress import Progress
from keyquery.support.statistics import Interval, paired
from keyquery_studies.causes.fill_in_model import LEARN, READERS, TEST, BlankModel, Blanks, keep, learn, load, right
from keyquery_studies.causes.searches import BEST, CALLS, LARGEST, NODES, ORDERS, SEARCHES, explained
from keyquery_studies.common.runner import device_name, run_jobs, study_folder
from keyquery_studies.common.store import result_name

FIGURES = ("size", "calls", "rank", "kept")
WIDTH, DEPTH, HEADS, BATCH = 64, 2, 4, 64
# Steps, learning rate, dropout, and the maximum masked share of a sequence in training.
SETTINGS = {"sentiment": (500, 2e-3, 0.3, 0.8), "recommendation": (2000, 3e-3, 0.2, 0.6)}
KEYS = ("application", "order", "search")


@dataclass(frozen=True, kw_only=True)
class CausesStudy(Reading, kind="causes study"):
    """What it took to change each prediction, and the accuracy of the models."""

    models: Sequence[Mapping[str, Any]]  # one per training
    rows: Sequence[Mapping[str, Any]]  # one per prediction; `found` by order and search: size, calls, rank, kept

    def records(self) -> list[dict[str, Any]]:
        """One row per prediction, order and search; a size of None: no set was found."""
        rows = []
        for row in self.rows:
            same = {key: value for key, value in row.items() if key != "found"}
            for name, values in row["found"].items():
                order, search = name.split()
                rows.append({**same, "order": order, "search": search, **dict(zip(FIGURES, values, strict=True))})
        return rows

    def summary(self) -> list[dict[str, Any]]:
        """One row per order and search: share of predictions changed, set sizes and queries, each with an interval.

        `shorter` and `fewer` are how many tokens and calls the causal graph saves against it, prediction by prediction,
        where both found a set; `rank` and `kept` are medians and means where a set was found. `…_median` are medians.
        """
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in self.records():
            groups.setdefault(tuple(row[key] for key in KEYS), []).append(row)
        return [self._summed(key, rows, groups[key[0], ORDERS[0], key[2]]) for key, rows in groups.items()]

    def _summed(self, key: tuple[str, ...], rows: list[Any], ours: list[Any]) -> dict[str, Any]:
        hits = [row for row in rows if row["size"] is not None]
        both = [(a, b) for a, b in zip(ours, rows, strict=True) if None not in (a["size"], b["size"])]
        saved = {
            name: _interval([a[figure] for a, _ in both], [b[figure] for _, b in both])
            for name, figure in (("shorter", "size"), ("fewer", "calls"))
        }
        ranks = sorted(row["rank"] or BEST + 1 for row in hits)
        return {
            **dict(zip(KEYS, key, strict=True)),
            "predictions": len(rows),
            "found": _interval([0.0] * len(rows), [float(row["size"] is not None) for row in rows]),
            "size": _interval([0.0] * len(hits), [row["size"] for row in hits]),
            "calls": _interval([0.0] * len(rows), [row["calls"] for row in rows]),
            **saved,
            "size_median": median(row["size"] for row in hits) if hits else None,
            "calls_median": median(row["calls"] for row in rows),
            "fewer_median": median(b["calls"] - a["calls"] for a, b in both) if both else None,
            "compared": len(both),
            "rank": ranks[len(ranks) // 2] if ranks else None,
            "kept": sum(row["kept"] for row in hits) / len(hits) if hits else None,
        }


def _interval(before: Iterable[float], after: Iterable[float]) -> Interval | None:
    pair = [torch.tensor(list(values), dtype=torch.float64) for values in (before, after)]
    return paired(*pair) if len(pair[0]) > 1 else None


@dataclass(frozen=True, kw_only=True)
class BlankTrial:
    """Train one masked-token model, then explain its predictions."""

    application: str
    digest: str
    seed: int
    steps: int
    explain: int = 200

    @property
    def name(self) -> str:
        """The name of its result file."""
        design = (WIDTH, DEPTH, HEADS, BATCH, NODES, CALLS, LARGEST, *SETTINGS[self.application])
        return result_name((self.application, self.seed), {**asdict(self), "design": list(design)})

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, test, explain; an existing trained model is reused."""
        blanks = _load(folder, self.application, self.digest)
        torch.manual_seed(self.seed)
        sizes = (len(blanks.words), blanks.choices, blanks.ids.shape[1])
        model = BlankModel(*sizes, WIDTH, DEPTH, HEADS, SETTINGS[self.application][2]).to(device)
        seconds = self._train(model, blanks, folder)
        ids, answers = blanks.part(TEST)
        return {
            **asdict(self),
            "accuracy": right(model, ids, answers),
            "among_ten": right(model, ids, answers, BEST) if blanks.choices > BEST else None,
            "popular": _popular(blanks),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "seconds": seconds,
            "device": device_name(device),
            "rows": self._explained(model, ids, device),
        }

    def _train(self, model: BlankModel, blanks: Blanks, folder: Path) -> float | None:
        """Training time; None if the weights existed already."""
        _, lr, _, hidden = SETTINGS[self.application]
        settings = [WIDTH, DEPTH, HEADS, BATCH, *SETTINGS[self.application], self.steps, self.digest]
        name = result_name((self.application, self.seed), {"seed": self.seed, "settings": settings})
        kept = (folder / "models" / name).with_suffix(".safetensors")
        if kept.exists():
            model.load_state_dict(load_file(kept))
            model.eval()
            return None
        start, every = perf_counter(), max(self.steps // 10, 1)
        rise = min(200, self.steps)
        recipe = Recipe(self.steps, lr=lr, warmup=rise, weight_decay=0.1, check_every=every, seed=self.seed)
        learn(model, blanks, recipe, BATCH, hidden)
        kept.parent.mkdir(exist_ok=True)
        write_all({kept: save(model.state_dict())})
        return perf_counter() - start

    def _explained(self, model: BlankModel, ids: Tensor, device: str) -> list[dict[str, Any]]:
        """Different sequences for every seed, so that no prediction counts twice."""
        drawn = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1000 + self.seed))[: self.explain]
        rows = []
        for number in drawn.tolist():
            result = explained(model, ids[number].to(device), number)
            rows.append({"application": self.application, "seed": self.seed, "sequence": number, **result})
        return rows


def _popular(blanks: Blanks) -> float:
    """The share of blanks to test on that the likeliest choice of all fills, or one of the ten likeliest."""
    _, learned = blanks.part(LEARN)
    most = torch.bincount(learned, minlength=blanks.choices).topk(min(BEST, blanks.choices // 2)).indices
    return float(torch.isin(blanks.part(TEST)[1], most).float().mean())


@lru_cache(maxsize=1)
def _load(folder: Path, application: str, digest: str) -> Blanks:
    return load(folder, application, digest)


def run(
    sources: Mapping[str, str | Path],
    out: str | Path | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    count: int = 200,
    steps: int | None = None,
    device: str = "auto",
    workers: int = 1,
    progress: Progress | None = None,
) -> CausesStudy:
    """Train the models, explain `count` predictions of each, and compare the orders.

    `sources` are files by name: "sentiment", a .tsv file with columns split, label and text; "recommendation", the
    .csv of Online Retail. With `out`, every result is kept there, and nothing is computed twice.

    Parameters
    ----------
    sources
        Files by name of the task.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    seeds
        One training each.
    count
        Explained predictions per model. Default: 200.
    steps
        Of training. Default: those of the study.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    CausesStudy
        A Reading.
    """
    if not sources:
        raise ValueError(f"at least one file is needed: {', '.join(READERS)}")
    check_count("count", count, least=2)
    check_count("steps", steps, optional=True)
    check_count("workers", workers)
    chosen = pick_device(device)
    with study_folder(out) as folder:
        facts = dict[str, Any]()
        for name, path in sources.items():
            check_choice("application", name, tuple(READERS))
            facts[name] = keep(READERS[name](path), folder, name)
        trials = [
            BlankTrial(
                application=name,
                digest=facts[name]["digest"],
                seed=seed,
                steps=steps or SETTINGS[name][0],
                explain=count,
            )
            for seed in dict.fromkeys(seeds)
            for name in facts
        ]
        models = run_jobs(trials, folder, chosen, workers, progress)
    rows = [row for model in models for row in model.pop("rows")]
    limits = {"nodes": NODES, "largest": LARGEST, "calls": CALLS, "orders": ORDERS, "searches": SEARCHES}
    return CausesStudy(
        models=models, rows=rows, provenance=provenance(sets=facts, device=device_name(chosen), **limits)
    )
