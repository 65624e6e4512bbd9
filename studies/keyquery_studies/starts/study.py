"""Study `starts`: is a symmetric initialisation better because Wq = Wk, or because of the scale of QK at the start?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from time import time
from typing import Any

from keyquery.capture.load import pick_device
from keyquery.reading import Reading, provenance
from keyquery_studies.common.comparisons import difference, holm
from keyquery_studies.common.language_models import first_below, prepare
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.common.runner import study_folder
from keyquery_studies.common.store import Store
from keyquery_studies.starts.training import STARTS, Late, StartRun, trained

RATES = {"masked": (2e-3, 4e-3, 8e-3), "next token": (4e-3, 8e-3, 16e-3)}
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

    def starts(self) -> list[dict[str, Any]]:
        """Every start at its best rate, by validation over all seeds: losses, the last improvement, and other rates.

        `improved` is by how much validation loss fell over the last tenth of the steps; `edge` if no lower or no higher
        rate was tried.
        """
        rows = []
        for objective, start in product(OBJECTIVES, STARTS):
            own = self._of(objective, start)
            if own:
                tried = {row["lr"] for row in self.models if (row["objective"], row["start"]) == (objective, start)}
                values = [row["loss"] for row in own]
                late = [_at(row, 0.9) - min(value for _, value in row["curve"]) for row in own]
                rows.append(
                    {
                        "objective": objective,
                        "start": start,
                        "seeds": len(own),
                        "lr": own[0]["lr"],
                        "edge": own[0]["lr"] in (min(tried), max(tried)),
                        "loss": mean(values),
                        "loss_sd": stdev(values) if len(values) > 1 else None,
                        "improved": mean(late),
                    }
                )
        return rows

    def summary(self) -> list[dict[str, Any]]:
        """Each factor: paired differences of test loss, and of steps to the loss that all models reach.

        p by Holm over all rows, of losses (`p`) and of steps (`steps_p`) apart.
        """
        rows = []
        for objective in OBJECTIVES:
            for factor, (start, base) in FACTORS.items():
                one, other = self._of(objective, start), self._of(objective, base)
                if one and other:
                    steps = difference(self._timed(objective, start), self._timed(objective, base), "steps")
                    row: dict[str, Any] = {"objective": objective, "factor": factor, "start": start, "less": base}
                    row |= difference(one, other, "loss")
                    rows.append(row | {f"steps_{key}": steps[key] for key in ("change", "low", "high", "p")})
        for name in ("p", "steps_p"):
            known = [row for row in rows if row[name] is not None]
            for row, p in zip(known, holm([row[name] for row in known]), strict=True):
                row[name] = p
        return rows

    def _of(self, objective: str, start: str) -> list[Mapping[str, Any]]:
        """The models of a start at its best rate."""
        own = [row for row in self.models if (row["objective"], row["start"]) == (objective, start)]
        groups = {rate: [row for row in own if row["lr"] == rate] for rate in {row["lr"] for row in own}}
        rate = min(groups, key=lambda rate: mean(row["validation"] for row in groups[rate]), default=None)
        return [] if rate is None else groups[rate]

    def _timed(self, objective: str, start: str) -> list[dict[str, Any]]:
        """Steps to the loss that every model of the objective at its best rate reaches."""
        worst = max(row["validation"] for name in STARTS for row in self._of(objective, name))
        return [{"seed": row["seed"], "steps": first_below(row["curve"], worst)} for row in self._of(objective, start)]


def _at(row: Mapping[str, Any], share: float) -> float:
    """The lowest validation loss in the first `share` of the steps."""
    return float(min(value for step, value in row["curve"] if step <= share * row["steps"]))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    objectives: tuple[str, ...] = OBJECTIVES
    steps: int = 8000
    vocabulary: int = 512

    def runs(self, objective: str, text: str) -> list[StartRun]:
        """Every start at three rates with all seeds."""
        options: dict[str, Any] = {"text": text, "steps": self.steps, "vocabulary": self.vocabulary}
        return [
            StartRun(objective=objective, start=start, lr=rate, seed=seed, **options)
            for start, rate, seed in product(STARTS, RATES[objective], self.seeds)
        ]


def run(
    corpus: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    seconds: float = float("inf"),
) -> Starts:
    """Train all starts of each objective side by side; with `out`, finished ones are not repeated.

    A start whose best rate is at the edge of its grid is trained at the next rate as well, once. After `seconds`
    nothing further is trained.
    """
    plan, chosen, end = plan or Plan(), pick_device(device), time() + seconds
    with study_folder(out) as folder:
        facts = prepare(corpus, folder, plan.vocabulary)
        rows = [
            row
            for o in plan.objectives
            for row in _rows(plan, o, facts["digest"], folder, chosen, lambda: time() > end)
        ]
    return Starts(models=rows, provenance=provenance(corpus=facts, plan=asdict(plan)))


def _rows(plan: Plan, objective: str, text: str, folder: Path, device: str, late: Late) -> list[dict[str, Any]]:
    store, runs = Store(folder / "results"), plan.runs(objective, text)
    _train(runs, store, folder, device, late)
    reading = Starts(models=_read(runs, store), provenance={})
    beyond = []
    for row in reading.starts():
        if row["edge"]:
            rates = sorted(RATES[objective])
            rate = rates[0] / 2 if row["lr"] == rates[0] else rates[-1] * 2
            example = next(own for own in runs if own.start == row["start"])
            beyond += [replace(example, lr=float(f"{rate:.3g}"), seed=seed) for seed in plan.seeds]
    _train(beyond, store, folder, device, late)
    return _read([*runs, *beyond], store)


def _train(runs: Sequence[StartRun], store: Store, folder: Path, device: str, late: Late) -> None:
    todo = [own for own in runs if not store.done(own.name)]
    rows = trained(todo, folder, device, late) if todo and not late() else None
    for own, row in zip(todo, rows or [], strict=bool(rows)):
        store.write(own.name, row, allow_nan=True)


def _read(runs: Sequence[StartRun], store: Store) -> list[dict[str, Any]]:
    return [store.read(own.name) for own in runs if store.done(own.name)]
