"""Study `starts`: is a symmetric initialisation better because Wq = Wk, or because of the scale of QK at the start?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, stdev
from time import time
from typing import Any

from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery_studies.common.comparisons import difference, holm
from keyquery_studies.common.language_models import first_below, prepare
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.common.rows import firsts
from keyquery_studies.common.runner import study_folder
from keyquery_studies.starts.model import STARTS, StartRun
from keyquery_studies.starts.training import trained

RATES = {"masked": (1e-3, 2e-3, 4e-3), "next token": (2e-3, 4e-3, 8e-3, 16e-3)}
# One factor each: the tie at two scales, the scale with and without a tie, and the tie as it is published, which also
# raises ‖M‖.
FACTORS = {
    "tie at the default scale": ("matched", "default"),
    "tie at the small scale": ("small tied", "small"),
    "small scale, untied": ("small", "default"),
    "small scale, tied": ("small tied", "matched"),
    "tie as published": ("tied", "default"),
}


@dataclass(frozen=True, kw_only=True)
class Starts(Reading, kind="starts study"):
    """Language models by the start of their queries and keys."""

    models: Sequence[Mapping[str, Any]]  # one per training

    def records(self) -> list[dict[str, Any]]:
        """One row per training; curves are in the JSON only."""
        return [{key: value for key, value in row.items() if key != "curve"} for row in self.models]

    @classmethod
    def joined(cls, *parts: Starts) -> Starts:
        """One reading of separate runs; of the same training the first counts."""
        keys = [field.name for field in fields(StartRun)]
        rows = firsts((row for part in parts for row in part.models), keys)
        return cls(models=rows, provenance={"runs": [part.provenance for part in parts]})

    def budgets(self, objective: str) -> list[int]:
        """The numbers of steps of an objective, ascending."""
        return sorted({row["steps"] for row in self.models if row["objective"] == objective})

    def starts(self) -> list[dict[str, Any]]:
        """Every start at its best rate, by validation over all seeds, for each number of steps.

        `improved` is by how much validation loss fell in the second half of the steps at a constant rate; `edge` if no
        lower or no higher rate was tried.
        """
        rows = []
        for objective, start in product(OBJECTIVES, STARTS):
            for steps in self.budgets(objective):
                if own := self.best(objective, start, steps):
                    tried = {row["lr"] for row in self._all(objective, start, steps)}
                    values = [row["loss"] for row in own]
                    late = [_at(row, 0.4) - _at(row, 0.8) for row in own]
                    place = {"objective": objective, "start": start, "steps": steps, "seeds": len(own)}
                    row = {**place, "lr": own[0]["lr"], "rates": len(tried)}
                    row |= {"edge": own[0]["lr"] in (min(tried), max(tried)), "loss": mean(values)}
                    row |= {"loss_sd": stdev(values) if len(values) > 1 else None}
                    rows.append(row | {"improved": None if any(map(math.isnan, late)) else mean(late)})
        return rows

    def summary(self) -> list[dict[str, Any]]:
        """Each factor: paired differences of test loss, and of steps to the loss that all models reach.

        Numbers of steps are ranked, 0 the lowest of each objective. p by Holm over all rows of a `rank`, of losses
        (`p`) and of steps (`steps_p`) apart.
        """
        ranks = max((len(self.budgets(objective)) for objective in OBJECTIVES), default=0)
        return [row for rank in range(ranks) for row in self._factors(rank)]

    def longer(self) -> list[dict[str, Any]]:
        """What each number of steps gains over the next lower one: paired differences of test loss by start."""
        rows = []
        for objective, start in product(OBJECTIVES, STARTS):
            for fewer, more in pairwise(self.budgets(objective)):
                one, other = self.best(objective, start, more), self.best(objective, start, fewer)
                if one and other:
                    place = {"objective": objective, "start": start, "steps": more, "less": fewer}
                    rows.append(place | difference(one, other, "loss"))
        return rows

    def _factors(self, rank: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for objective in OBJECTIVES:
            steps = self.budgets(objective)[rank : rank + 1]
            arms = {start: self.best(objective, start, steps[0]) for start in STARTS} if steps else {}
            lowest = [min(value for _, value in row["curve"]) for own in arms.values() for row in own]
            for factor, (start, base) in FACTORS.items():
                if arms and arms[start] and arms[base]:
                    one, other = (_timed(arms[name], max(lowest)) for name in (start, base))
                    saved = {f"steps_{key}": value for key, value in difference(one, other, "steps").items()}
                    place: dict[str, Any] = {"objective": objective, "rank": rank, "steps": steps[0], "factor": factor}
                    row = place | {"start": start, "less": base} | difference(arms[start], arms[base], "loss")
                    rows.append(row | {key: value for key, value in saved.items() if key != "steps_seeds"})
        for name in ("p", "steps_p"):
            known = [row for row in rows if row[name] is not None]
            for row, p in zip(known, holm([row[name] for row in known]), strict=True):
                row[name] = p
        return rows

    def _all(self, objective: str, start: str, steps: int) -> list[Mapping[str, Any]]:
        wanted = (objective, start, steps)
        return [row for row in self.models if (row["objective"], row["start"], row["steps"]) == wanted]

    def best(self, objective: str, start: str, steps: int) -> list[Mapping[str, Any]]:
        """The models of a start at its best rate, which needs the seeds of all rates."""
        own = self._all(objective, start, steps)
        groups = {rate: [row for row in own if row["lr"] == rate] for rate in sorted({row["lr"] for row in own})}
        rate = min(groups, key=lambda rate: mean(row["validation"] for row in groups[rate]), default=None)
        return [] if rate is None else groups[rate]


def _timed(rows: Sequence[Mapping[str, Any]], loss: float) -> list[dict[str, Any]]:
    """Steps until a loss is reached."""
    return [{"seed": row["seed"], "steps": first_below(row["curve"], loss)} for row in rows]


def _at(row: Mapping[str, Any], share: float) -> float:
    """The lowest validation loss in the first `share` of the steps; NaN before the first evaluation."""
    return float(min((value for step, value in row["curve"] if step <= share * row["steps"]), default=math.nan))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    objectives: tuple[str, ...] = OBJECTIVES
    steps: tuple[int, ...] = (2500, 10000)  # what more steps gain shows convergence
    rates: tuple[float, ...] = ()  # default: those of the objective
    vocabulary: int = 512

    def __post_init__(self) -> None:
        for objective in self.objectives:
            check_choice("objective", objective, OBJECTIVES)
        for steps in self.steps:
            check_count("steps", steps)
        if not self.seeds or not self.steps or any(rate <= 0 for rate in self.rates):
            raise ValueError(f"seeds and steps must not be empty, and rates above 0, got {self}")

    def runs(self, objective: str, steps: int, text: str) -> list[StartRun]:
        """Every start at all rates with all seeds."""
        options: dict[str, Any] = {"text": text, "steps": steps, "vocabulary": self.vocabulary}
        return [
            StartRun(objective=objective, start=start, lr=rate, seed=seed, **options)
            for start, rate, seed in product(STARTS, self.rates or RATES[objective], self.seeds)
        ]


def run(
    corpus: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    seconds: float = float("inf"),
) -> Starts:
    """Train all starts of each objective side by side; with `out`, finished ones are not repeated.

    After `seconds` no further branch is begun; with `out`, a later run resumes from the last checkpoint.
    """
    plan, chosen, end = plan or Plan(), pick_device(device), time() + seconds
    with study_folder(out) as folder:
        facts = prepare(corpus, folder, plan.vocabulary)
        late = lambda: time() > end  # noqa: E731
        plans = [plan.runs(objective, max(plan.steps), facts["digest"]) for objective in plan.objectives]
        rows = [row for runs in plans for row in trained(runs, plan.steps, folder, chosen, late)]
    return Starts(models=rows, provenance=provenance(corpus=facts, plan=asdict(plan)))
