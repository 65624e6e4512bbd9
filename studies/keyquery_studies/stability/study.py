"""Study `stability`: how many steps before its loss spikes does an alarm warn of a training that will diverge?

Small RoPE language models are trained under a monitor at learning rates from safe to far too high, by two recipes, with
and without QK-norm, and with symmetric, split and tied-start kernels. Those that diverge are trained once more under
QK-Clip. Alarms and simple rules are fit on the runs of some seeds, and judged on those of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from time import time
from typing import Any

from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.language_models import prepare, text_in
from keyquery_studies.common.runner import run_jobs, study_folder
from keyquery_studies.stability.outcome import SPIKE, outcome
from keyquery_studies.stability.training import Stack
from keyquery_studies.stability.trial import KERNELS, RECIPES, Trial
from keyquery_studies.stability.warning import FAMILIES, FIXED, Watched, fit, judged

LEAST = 50  # steps of an interrupted training that is shown
MATCHED = ("recipe", "rate", "seed", "normed", "kernel", "depth")
SHOWN = (*MATCHED, "tau", "steps", "done", "clips")


@dataclass(frozen=True, kw_only=True)
class StabilityStudy(Reading, kind="stability study"):
    """One row per training: how it ended, when its loss spiked, and the first warning of every rule."""

    rows: Sequence[Mapping[str, Any]]
    rules: Sequence[Mapping[str, Any]] = ()  # of every rule, by set of runs and recipe: warnings and false alarms

    def records(self) -> list[dict[str, Any]]:
        """One row per training, with the first warning of each rule."""
        return [
            {key: value for key, value in row.items() if key != "first"}
            | {f"first: {rule}": step for rule, step in row["first"].items()}
            for row in self.rows
        ]

    def summary(self) -> list[dict[str, Any]]:
        """Warnings and false alarms of every rule, then rescues by QK-Clip, then kernels."""
        return [*map(dict, self.rules), *self.rescued(), *self.kernels()]

    def rescues(self) -> list[dict[str, Any]]:
        """Diverging runs that were trained once more under QK-Clip: how they ended, and at what loss."""
        free = {_key(row): row for row in self.rows if row["tau"] is None}
        stable = [row for row in free.values() if row["outcome"] == "stable" and row["final"] is not None]
        pairs = []
        for row in self.rows:
            twin = free.get(_key(row))
            if row["tau"] is not None and twin is not None and twin["outcome"] == "diverged":
                alike = [other["final"] for other in stable if other["recipe"] == row["recipe"]]
                same = {name: row[name] for name in (*MATCHED, "outcome", "final", "lowest", "clips")}
                pairs.append(
                    {**same, "spike_without": twin["spike"], "final_without": twin["final"],
                     "lowest_without": twin["lowest"], "best_stable": min(alike, default=None)}
                )  # fmt: skip
        return pairs

    def rescued(self) -> list[dict[str, Any]]:
        """Counts of `rescues`, by recipe and rate, over all kernels."""
        pairs = sorted(self.rescues(), key=lambda row: (row["recipe"], row["rate"]))
        counts = []
        for (recipe, rate), group in groupby(pairs, lambda row: (row["recipe"], row["rate"])):
            rows = list(group)
            ended = [row["outcome"] for row in rows]
            saved = [row for row in rows if row["outcome"] != "diverged"]
            counts.append(
                {"recipe": recipe, "rate": rate, "diverged_without": len(rows),
                 **{kind: ended.count(kind) for kind in ("stable", "recovered", "diverged")},
                 "final_of_rescued": _median(row["final"] for row in saved),
                 "their_lowest_without": _median(row["lowest_without"] for row in saved),
                 "best_stable": min((row["best_stable"] for row in rows if row["best_stable"]), default=None)}
            )  # fmt: skip
        return counts

    def kernels(self) -> list[dict[str, Any]]:
        """Outcomes by recipe and kernel, over the cells (rate, seed) in which all kernels were trained."""
        rows = [row for row in self.rows if row["tau"] is None and not row["normed"]]
        cells: dict[Any, dict[str, Any]] = {}
        for row in rows:
            cells.setdefault((row["recipe"], row["rate"], row["seed"], row["depth"]), {})[row["kernel"]] = row
        counts = []
        for recipe in RECIPES:
            whole = [cell for at, cell in cells.items() if at[0] == recipe and set(KERNELS) <= set(cell)]
            for kernel in KERNELS if whole else ():
                of_kernel = [cell[kernel] for cell in whole]
                later = [_compared(cell[kernel], cell["general"]) for cell in whole]
                counts.append(
                    {"recipe": recipe, "kernel": kernel, "trained": len(whole),
                     "diverged": sum(row["outcome"] == "diverged" for row in of_kernel),
                     "median_spike": _median(row["spike"] for row in of_kernel if row["outcome"] == "diverged"),
                     "median_final": _median(row["final"] for row in of_kernel),
                     "later_than_general": later.count(1), "sooner_than_general": later.count(-1)}
                )  # fmt: skip
        return counts

    @classmethod
    def joined(cls, *parts: StabilityStudy) -> StabilityStudy:
        """One reading of separate runs."""
        return cls(
            rows=[row for part in parts for row in part.rows],
            rules=[rule for part in parts for rule in part.rules],
            provenance={"runs": [part.provenance for part in parts]},
        )


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in MATCHED)


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _compared(row: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """1 if a run diverges later than another, or never; −1 if sooner; 0 if both never do, or at the same step."""
    one, two = (r["spike"] if r["outcome"] == "diverged" else float("inf") for r in (row, other))
    return (one > two) - (one < two)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained: every recipe, rate and seed; other arms at some of these; then what diverged, under QK-Clip."""

    recipes: tuple[str, ...] = RECIPES
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 0.06, 0.12, 0.25, 0.5)
    edge: tuple[float, ...] = (0.06, 0.12, 0.25)  # rates at which kernels are compared
    normed: tuple[float, ...] = (3e-3, 3e-2, 0.25, 0.5)  # rates of models with QK-norm, by two seeds of each set
    seeds: tuple[int, ...] = (0, 1, 2)  # on whose runs rules are fit
    held_out: tuple[int, ...] = (3, 4, 5)  # on whose runs they are judged
    tau: float = 100.0
    steps: int = 1100
    width: int = 256
    depth: int = 4
    length: int = 128
    batch: int = 8
    vocabulary: int = 1024

    def trials(self, text: str) -> list[list[Trial]]:
        """All trials without QK-Clip; lists are trained side by side."""
        every, few = (*self.seeds, *self.held_out), (*self.seeds[:2], *self.held_out[:2])
        arms = [
            self._arm(text, self.rates, every) + self._arm(text, self.edge, every, kernel="tied"),
            *(self._arm(text, self.edge, every, kernel=kernel) for kernel in ("symmetric", "split")),
            self._arm(text, self.normed, few, normed=True),
        ]
        return [sorted(arm, key=lambda trial: self.recipes.index(trial.recipe)) for arm in arms]

    def _arm(self, text: str, rates: Sequence[float], seeds: Sequence[int], **arm: Any) -> list[Trial]:
        names = ("steps", "width", "depth", "length", "batch", "vocabulary")
        same = {name: getattr(self, name) for name in names} | arm
        return [
            Trial(recipe=recipe, rate=rate, seed=seed, text=text, **same)
            for recipe in self.recipes
            for seed in seeds
            for rate in rates
        ]


def run(
    data: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    minutes: float | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> StabilityStudy:
    """Train according to the plan, and return how every training ended and who warned of it.

    `data` is a text file, or a folder with one. With `out`, results are kept there: a later run resumes, also one that
    `minutes` interrupted. `workers` processes share the device.
    """
    plan = plan or Plan()
    check_count("workers", workers)
    if data is None and out is None:
        raise ValueError("data must be a text file, or a folder with one")
    until = None if minutes is None else time() + 60 * minutes
    chosen = pick_device(device)
    with study_folder(out) as folder:
        facts = prepare(None if data is None else text_in(Path(data)), folder, plan.vocabulary, force)
        stacks = [Stack(tuple(trials), plan.tau, until) for trials in plan.trials(facts["digest"])]
        results = run_jobs(stacks, folder, chosen, workers, progress)
    rows = [row for result in results for row in result["rows"]]
    missing = sum(row["done"] < row["steps"] for row in rows)
    return reading_of([row for row in rows if row["done"] >= LEAST], plan, corpus=facts, missing=missing)


def _free(row: Mapping[str, Any], recipe: str) -> bool:
    return row["tau"] is None and row["outcome"] == "stable" and row["recipe"] == recipe


def reading_of(rows: Sequence[Mapping[str, Any]], plan: Plan, **facts: Any) -> StabilityStudy:
    """The reading of stored trainings: rules are fit on the first seeds, and judged on the held-out ones.

    False alarms are counted in stable runs, and again in healthy ones alone: stable runs that end less than 0.5 nats
    above the best of their recipe.
    """
    ended = [{**{name: row[name] for name in SHOWN}, **outcome(row)} for row in rows]
    best = {
        recipe: min((row["final"] for row in ended if _free(row, recipe)), default=math.inf) for recipe in plan.recipes
    }
    for row in ended:
        row["healthy"] = row["outcome"] == "stable" and row["final"] < best[row["recipe"]] + SPIKE
    watched = {at: Watched(row, ended[at]["spike"]) for at, row in enumerate(rows) if row["tau"] is None}

    def of(seeds: Sequence[int], recipe: str | None, kind: str) -> list[Watched]:
        return [
            runs
            for at, runs in watched.items()
            if rows[at]["seed"] in seeds
            and recipe in (None, rows[at]["recipe"])
            and (ended[at]["healthy"] if kind == "healthy" else ended[at]["outcome"] == kind)
        ]

    rules, used = [], dict.fromkeys(FIXED)
    for kind in ("stable", "healthy"):
        fitted = [fit(family, of(plan.seeds, None, "diverged"), of(plan.seeds, None, kind)) for family in FAMILIES]
        used |= dict.fromkeys(fitted)
        rules += [
            {"against": kind, "runs": name, "recipe": recipe or "both", "fitted": index >= len(FIXED)}
            | judged(rule, of(seeds, recipe, "diverged"), of(seeds, recipe, kind))
            for name, seeds in (("held out", plan.held_out), ("calibration", plan.seeds))
            for recipe in (None, *plan.recipes)
            for index, rule in enumerate((*FIXED, *fitted))
        ]
    for at, row in enumerate(ended):
        row["first"] = {str(rule): watched[at].first(rule) for rule in used} if at in watched else {}
    facts |= {"plan": asdict(plan), "devices": sorted({row["device"] for row in rows})}
    return StabilityStudy(rows=ended, rules=rules, provenance=provenance(**facts))
