"""Study `time`: does continuous-time attention do better than attention that uses order alone?

Users are split apart, and the information that a model has is named in every row: the past alone, or also the time of
the predicted event, as in published work, which helps by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from time import time as now
from typing import Any

import numpy as np

from keyquery.learn.events.model import EventModel
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.files import write_all
from keyquery.support.progress import Progress
from keyquery_studies.common.comparisons import difference, holm
from keyquery_studies.common.rates import tuned
from keyquery_studies.common.rows import firsts, over_seeds
from keyquery_studies.common.runner import device_name, run_jobs, study_folder
from keyquery_studies.common.store import array_file, digest_of, npz_bytes, result_name
from keyquery_studies.time.arms import ARMS, RATES, ArmTrial
from keyquery_studies.time.event_files import READERS, TEST, split
from keyquery_studies.time.hawkes import exact, simulate

# What is compared: the code of time, how it enters, from when it counts, and what is known.
WAYS = (
    ("positions", "concatenated", False, "past"),
    ("bochner", "concatenated", False, "past"),
    ("mercer", "concatenated", False, "past"),
    ("mercer", "additive", False, "past"),
    ("mercer", "interaction", False, "past"),
    ("mercer", "concatenated", True, "past"),
    ("mercer", "concatenated", False, "target_time"),
)
SETTING = ("dataset", "time", "how", "calendar", "information")
FIGURES = ("accuracy", "nll_type", "nll_gap")
CONTRASTS = (("gap", "order"), ("kernel", "order"), ("both", "gap"))


@dataclass(frozen=True, kw_only=True)
class TimeStudy(Reading, kind="time study"):
    """Prediction of next events on unseen groups, per training, and by counts alone."""

    rows: Sequence[Mapping[str, Any]]  # one per training
    counts: Sequence[Mapping[str, Any]]  # one a set and a way to count
    arms: Sequence[Mapping[str, Any]] = ()  # one per training of the four arms, with the arm's own learning rate
    exact: Mapping[str, float] = field(default_factory=dict)  # the true process on the test groups of the simulation

    def records(self) -> list[dict[str, Any]]:
        """One row per training, and one per counting baseline."""
        return [dict(row) for row in (*self.counts, *self.rows, *self.arms)]

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds; `gain` is the improvement over positions in nats per event, for the type.

        It is the difference between the two of the same seed.
        """
        rows = []
        for row in self.rows:
            same = {**row, "time": "positions", "how": "concatenated", "calendar": False, "information": "past"}
            keys = (*SETTING, "seed")
            base = next((other for other in self.rows if all(other[key] == same[key] for key in keys)), None)
            rows.append({**row, "gain": None if base is None else base["nll_type"] - row["nll_type"]})
        return over_seeds(rows, SETTING, (*FIGURES, "gain"))

    def contrasts(self) -> list[dict[str, Any]]:
        """Differences between arms, paired by seed, in nats, with 95 % intervals and Holm's correction over all.

        Negative: the first arm is better.
        """
        rows = []
        for dataset in dict.fromkeys(row["dataset"] for row in self.arms):
            own = {arm: [r for r in self.arms if (r["dataset"], r["arm"]) == (dataset, arm)] for arm in ARMS}
            rows += [
                {"dataset": dataset, "of": name, "arm": arm, "less": base, **difference(own[arm], own[base], name)}
                for name in FIGURES[1:]
                for arm, base in CONTRASTS
            ]
        known = [row for row in rows if row["p"] is not None]
        for row, corrected in zip(known, holm([row["p"] for row in known]), strict=True):
            row["corrected"] = corrected
        return rows

    @classmethod
    def joined(cls, *parts: TimeStudy) -> TimeStudy:
        """One reading of separate runs."""
        return cls(
            rows=firsts((row for part in parts for row in part.rows), (*SETTING, "seed", "digest")),
            counts=firsts((row for part in parts for row in part.counts), ("dataset", "by")),
            arms=firsts((row for part in parts for row in part.arms), ("dataset", "arm", "lr", "seed", "digest")),
            exact=next((part.exact for part in parts if part.exact), {}),
            provenance={"runs": [part.provenance for part in parts]},
        )


@dataclass(frozen=True, kw_only=True)
class EventTrial:
    """An `EventModel` trained on four fifths of the groups and tested on the others."""

    dataset: str
    digest: str
    time: str
    how: str
    calendar: bool  # whether times count from one date for all, so that seasons are seen
    information: str
    seed: int
    width: int = 32
    depth: int = 1
    window: int = 80
    gap_weight: float = 0.1  # the type is what is compared
    epochs: int = 20
    batch: int = 64

    @property
    def name(self) -> str:
        """The name of its result file."""
        words = (self.dataset, self.time, self.how, self.calendar, self.information, self.seed)
        return result_name(words, {**asdict(self), "test": TEST})

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train and evaluate."""
        learned, test = split(folder / array_file(self.dataset, self.digest))
        settings = asdict(self)
        for key in ("dataset", "digest", "seed", "batch"):
            del settings[key]
        model = EventModel(**settings, batch_size=self.batch, random_state=self.seed, device=device)
        start = perf_counter()
        model.fit(*learned[:3])
        seconds = perf_counter() - start
        reading = model.evaluate(*test[:3])
        evaluated, *counts = reading.rows
        return {
            **asdict(self),
            **{name: evaluated[name] for name in FIGURES},
            "counts": [dict(row) for row in counts],
            "events": reading.events,
            "groups": reading.firsts,
            "epochs_run": len(model.history_),
            "parameters": sum(weight.numel() for weight in model.network_.parameters()),
            "seconds": seconds,
            "device": device_name(device),
        }


def prepare(sources: Mapping[str, str | Path], folder: Path, simulated: bool = False) -> dict[str, dict[str, Any]]:
    """Facts of every set, whose columns are put into `folder`; with `simulated` also of a Hawkes process."""
    facts, contents = {}, dict[str | Path, str | bytes]()
    for dataset in sources:
        check_choice("dataset", dataset, tuple(READERS))
    sets = {dataset: READERS[dataset](path) for dataset, path in sources.items()}
    for dataset, events in (sets | ({"hawkes": simulate()} if simulated else {})).items():
        digest = digest_of(events.types, events.times, events.groups)
        arrays = {"types": events.types, "times": events.times, "groups": events.groups}
        contents[folder / array_file(dataset, digest)] = npz_bytes(arrays)
        sizes = {"events": len(events.types), "groups": len(np.unique(events.groups))}
        facts[dataset] = {"digest": digest, **sizes, "types": len(np.unique(events.types)), "left_out": events.left_out}
    folder.mkdir(parents=True, exist_ok=True)
    write_all(contents)
    return facts


def run(
    sources: Mapping[str, str | Path],
    out: str | Path | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 20,
    width: int = 32,
    device: str = "auto",
    workers: int = 1,
    progress: Progress | None = None,
) -> TimeStudy:
    """Train every time encoding on every dataset, and compare.

    `sources` are files by name: "badges" (.npz), "retail" (.csv), "cdnow" (.txt), compressed or not. With `out`, every
    result is kept there, and nothing is computed twice.

    Parameters
    ----------
    sources
        Files by name of the dataset.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    seeds
        One training each.
    epochs, width
        Of every model. Default: 20, 32.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    TimeStudy
        A Reading.
    """
    if not sources:
        raise ValueError(f"at least one file is needed: {', '.join(READERS)}")
    for name, value in (("epochs", epochs), ("width", width), ("workers", workers)):
        check_count(name, value)
    chosen = pick_device(device)
    with study_folder(out) as folder:
        facts = prepare(sources, folder)
        trials = [
            EventTrial(
                dataset=dataset,
                digest=facts[dataset]["digest"],
                time=time,
                how=how,
                calendar=calendar,
                information=information,
                seed=seed,
                width=width,
                epochs=epochs,
            )
            for seed in dict.fromkeys(seeds)
            for dataset in facts
            for time, how, calendar, information in WAYS
        ]
        rows = run_jobs(trials, folder, chosen, workers, progress)
    counts = [{"dataset": row["dataset"], **count} for row in rows for count in row.pop("counts")]
    return TimeStudy(
        rows=rows,
        counts=firsts(counts, ("dataset", "by")),
        provenance=provenance(sets=facts, epochs=epochs, width=width, device=device_name(chosen)),
    )


def run_arms(
    sources: Mapping[str, str | Path],
    out: str | Path | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    epochs: int = ArmTrial.epochs,
    device: str = "auto",
    workers: int = 1,
    minutes: float | None = None,
    progress: Progress | None = None,
) -> TimeStudy:
    """Train the four arms on every dataset and on a simulated Hawkes process, of equal numbers of parameters.

    The learning rate of an arm on a dataset is the one with the lowest validation loss of the first seed. Nothing is
    started after `minutes`; with `out`, a later run resumes.
    """
    for name, value in (("epochs", epochs), ("workers", workers)):
        check_count(name, value)
    chosen, deadline = pick_device(device), None if minutes is None else now() + 60 * minutes
    with study_folder(out) as folder:
        facts = prepare(sources, folder, simulated=True)

        def train(trials: Sequence[ArmTrial]) -> list[dict[str, Any]]:
            return run_jobs(trials, folder, chosen, workers, progress)

        first = [
            ArmTrial(
                dataset=name, digest=facts[name]["digest"], arm=arm, seed=seeds[0], epochs=epochs, deadline=deadline
            )
            for name in facts
            for arm in ARMS
        ]
        best = tuned(first, RATES, train)
        rows = [
            row for row in train([replace(trial, seed=s) for s in seeds for trial in best]) if not row.get("partial")
        ]
        test = split(folder / array_file("hawkes", facts["hawkes"]["digest"]))[1]
    counts = [{"dataset": row["dataset"], **count} for row in rows for count in row.pop("counts")]
    return TimeStudy(
        rows=(),
        counts=firsts(counts, ("dataset", "by")),
        arms=rows,
        exact=exact(test),
        provenance=provenance(sets=facts, epochs=epochs, rates=RATES, device=device_name(chosen)),
    )
