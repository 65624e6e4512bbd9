"""Study `stability`: how many steps before its loss spikes does an alarm warn of a training that will diverge?

Small RoPE language models are trained under a monitor at learning rates from safe to far too high, by two recipes, with
and without QK-norm. Alarms are compared with simple rules on the same runs. Those that diverge are trained once more
under QK-Clip, and with symmetric, split and tied-start kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import time
from typing import Any

from keyquery.capture.load import pick_device
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.progress import Progress
from keyquery_studies.common.language_models import prepare
from keyquery_studies.common.runner import run_jobs, study_folder
from keyquery_studies.depth.study import text_in
from keyquery_studies.stability.outcome import RULES, first_warning, outcome
from keyquery_studies.stability.training import Stack
from keyquery_studies.stability.trial import KERNELS, RECIPES, Trial

LEAST = 50  # steps of an interrupted training that is shown


@dataclass(frozen=True, kw_only=True)
class StabilityStudy(Reading, kind="stability study"):
    """One row per training: how it ended, when its loss spiked, and the first warning of every rule."""

    rows: Sequence[Mapping[str, Any]]

    def records(self) -> list[dict[str, Any]]:
        """One row per training, with the first warning of each rule."""
        return [
            {key: value for key, value in row.items() if key not in ("first", "curve")}
            | {f"first {rule}": step for rule, step in row["first"].items()}
            for row in self.rows
        ]

    def rules(self, recipe: str | None = None) -> list[dict[str, Any]]:
        """Of each rule: median steps of warning over diverging runs, those warned of, and alarms in stable runs."""
        rows = [row for row in self.rows if row["tau"] is None and recipe in (None, row["recipe"])]
        lost = [row for row in rows if row["outcome"] == "diverged"]
        stable = [row for row in rows if row["outcome"] == "stable"]
        found = []
        for rule in RULES:
            ahead = [max(row["spike"] - row["first"][rule], 0) if row["first"][rule] is not None else 0 for row in lost]
            found.append(
                {
                    "rule": rule,
                    "diverged": len(lost),
                    "warned": sum(steps > 0 for steps in ahead),
                    "median_warning": median(ahead) if ahead else None,
                    "stable": len(stable),
                    "false_alarms": sum(row["first"][rule] is not None for row in stable),
                }
            )
        return found

    def rescues(self) -> list[dict[str, Any]]:
        """Diverging runs that were trained once more under QK-Clip: how they ended, and at what loss."""
        free = {_key(row): row for row in self.rows if row["tau"] is None}
        found = []
        for row in self.rows:
            twin = free.get(_key(row))
            if row["tau"] is not None and twin is not None and twin["outcome"] == "diverged":
                same = {name: row[name] for name in ("recipe", "rate", "seed", "outcome", "final", "clips")}
                found.append({**same, "spike": twin["spike"], "lowest_without": twin["lowest"]})
        return found

    def kernels(self) -> list[dict[str, Any]]:
        """Outcomes by kernel, over the cells (recipe, rate, seed) in which all kernels were trained."""
        rows = [row for row in self.rows if row["tau"] is None and not row["normed"]]
        cells: dict[Any, dict[str, Any]] = {}
        for row in rows:
            cells.setdefault((row["recipe"], row["rate"], row["seed"]), {})[row["kernel"]] = row
        whole = [cell for cell in cells.values() if set(KERNELS) <= set(cell)]
        return [
            {
                "kernel": kernel,
                "trained": len(whole),
                "diverged": sum(cell[kernel]["outcome"] == "diverged" for cell in whole),
                "median_spike": median(spikes)
                if (spikes := [cell[kernel]["spike"] for cell in whole if cell[kernel]["outcome"] == "diverged"])
                else None,
                "median_final": median(finals)
                if (finals := [cell[kernel]["final"] for cell in whole if cell[kernel]["final"] is not None])
                else None,
            }
            for kernel in KERNELS
        ]

    @classmethod
    def joined(cls, *parts: StabilityStudy) -> StabilityStudy:
        """One reading of separate runs."""
        return cls(
            rows=[row for part in parts for row in part.rows], provenance={"runs": [p.provenance for p in parts]}
        )


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("recipe", "rate", "seed", "normed", "kernel"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained: every recipe, rate and seed with and without QK-norm; then what diverged, changed."""

    recipes: tuple[str, ...] = RECIPES
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    seeds: tuple[int, ...] = (0, 1, 2)
    tau: float = 100.0
    steps: int = 1500
    width: int = 256
    depth: int = 4
    length: int = 128
    batch: int = 16
    vocabulary: int = 1024

    def trials(self, text: str) -> list[list[Trial]]:
        """Every recipe, rate and seed, free and under QK-Clip; for the first seed with QK-norm and other kernels."""

        def every(seeds: Sequence[int], **arm: Any) -> list[Trial]:
            return [
                Trial(recipe=recipe, rate=rate, seed=seed, text=text, **self._same(), **arm)
                for seed in seeds
                for rate in self.rates
                for recipe in self.recipes
            ]

        whole = every(self.seeds) + every(self.seeds, tau=self.tau)
        arms: list[dict[str, Any]] = [{"normed": True}, *({"kernel": kernel} for kernel in KERNELS[1:])]
        return [whole, *(every(self.seeds[:1], **arm) for arm in arms)]

    def _same(self) -> dict[str, Any]:
        names = ("steps", "width", "depth", "length", "batch", "vocabulary")
        return {name: getattr(self, name) for name in names}


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
        stacks = [Stack(tuple(trials), until) for trials in plan.trials(facts["digest"])]
        results = run_jobs(stacks, folder, chosen, workers, progress)
    rows = [row for result in results for row in result["rows"]]
    missing = sum(row["done"] < row["steps"] for row in rows)
    rows = [row for row in rows if row["done"] >= LEAST]
    facts = {"corpus": facts, "plan": asdict(plan), "devices": sorted({row["device"] for row in rows})}
    return StabilityStudy(rows=list(map(summary, rows)), provenance=provenance(**facts, missing=missing))


def summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """A training without its curves: settings, outcome, and the first warning of every rule."""
    settings = {
        name: row[name] for name in ("recipe", "rate", "seed", "normed", "kernel", "tau", "steps", "done", "clips")
    }
    ended = outcome(row)
    return {**settings, **ended, "first": first_warning(row, ended["spike"])}
