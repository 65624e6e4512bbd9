"""Study `mask`: the attention mask and the objective apart.

A masked model sees both sides, a next-token model only earlier tokens: a comparison of the two changes two factors. The
third arm changes one at a time: masked tokens, predicted from earlier ones alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.comparisons import difference, holm
from keyquery_studies.common.language_models import Sizes, Training, prepare
from keyquery_studies.common.objectives import CAUSAL, SHARES
from keyquery_studies.common.rates import tuned
from keyquery_studies.common.rows import over_seeds
from keyquery_studies.common.runner import run_jobs, study_folder

ARMS = tuple(CAUSAL)
FACTORS = {"mask": ("masked", "masked causal"), "objective": ("masked causal", "next token")}  # one changes per pair


@dataclass(frozen=True, kw_only=True)
class Masks(Reading, kind="mask study"):
    """Heads of trained models by objective, attention mask and position encoding."""

    models: Sequence[Mapping[str, Any]]  # one per model, with its heads
    rates: Sequence[Mapping[str, Any]]  # one per rate that was tried, without heads

    def records(self) -> list[dict[str, Any]]:
        """One row per head, window length and model."""
        keys = ("objective", "rope", "seed", "lr", "loss")
        return [{**{key: model[key] for key in keys}, **head} for model in self.models for head in model["heads"]]

    def layers(self) -> list[dict[str, Any]]:
        """Symmetry and shares of every layer: the mean over its heads, then mean and sd over seeds."""
        names = ("symmetry", *SHARES)
        return over_seeds(self._layers(), ("rope", "window", "layer", "objective"), names)

    def summary(self) -> list[dict[str, Any]]:
        """What each factor changes: differences of shares between two arms, over all layers, paired by seed.

        `p` is adjusted by Holm for all rows.
        """
        means = over_heads(self._layers(), ("rope", "window", "objective", "seed"))
        rows = []
        settings = dict.fromkeys((row["rope"], row["window"]) for row in means)
        for (rope, window), (factor, pair), name in product(
            settings, FACTORS.items(), ("position", "symmetric", "skew")
        ):
            arms = [
                [r for r in means if (r["rope"], r["window"], r["objective"]) == (rope, window, objective)]
                for objective in pair
            ]
            place = {"rope": rope, "window": window, "factor": factor, "part": name}
            rows.append({**place, **difference(arms[1], arms[0], name)})
        tested = [row for row in rows if row["p"] is not None]
        for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p"] = p
        return rows

    def _layers(self) -> list[dict[str, Any]]:
        return over_heads(self.records(), ("rope", "window", "layer", "objective", "seed"))


def over_heads(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Means of symmetry and shares over all rows that have the same keys."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    names = ("symmetry", *SHARES)
    return [
        {**dict(zip(keys, place, strict=True)), **{name: mean(row[name] for row in alike) for name in names}}
        for place, alike in groups.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """What is trained: every arm with learned positions and with RoPE, at its best rate, with every seed."""

    windows: tuple[int, ...] = (32, 64, 128)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.windows or not 0 < min(self.windows) <= max(self.windows) <= self.length:
            raise ValueError(f"windows must be from 1 to {self.length} tokens long, got {self.windows}")

    def arms(self, text: str) -> list[Training]:
        """Every arm with the first seed, on the text of a digest."""
        common = {"kernel": "general", "seed": self.seeds[0], "text": text, "windows": self.windows, **self.sizes()}
        return [Training(objective=objective, rope=rope, **common) for objective, rope in product(ARMS, (False, True))]


def run(
    corpus: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> Masks:
    """Train every arm, and measure every head on validation text.

    `corpus` is a text file, or a .tsv file with a column `text`, compressed or not. With `out`, tokens and results are
    kept there, and an interrupted study is resumed. Without a corpus the tokens in `out` are used. `workers` processes
    share the device.
    """
    plan = plan or Plan()
    check_count("workers", workers)
    chosen = pick_device(device)
    if corpus is None and out is None:
        raise ValueError("corpus must be a text file, or out the folder of an earlier run")
    tried: dict[str, dict[str, Any]] = {}
    with study_folder(out) as folder:
        facts = prepare(corpus, folder, plan.vocabulary, force)

        def train(jobs: Sequence[Training]) -> list[dict[str, Any]]:
            rows = run_jobs(jobs, folder, chosen, workers, progress)
            tried.update({job.name: row for job, row in zip(jobs, rows, strict=True)})
            return rows

        arms = tuned(plan.arms(facts["digest"]), plan.rates, train)
        models = train([replace(arm, seed=seed) for seed in plan.seeds for arm in arms])
    columns = ("objective", "rope", "lr", "seed", "validation")
    return Masks(
        models=models,
        rates=[{name: row[name] for name in columns} for row in tried.values()],
        provenance=provenance(corpus=facts, plan=asdict(plan), devices=sorted({row["device"] for row in models})),
    )
