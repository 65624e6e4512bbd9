"""Study `time`: does continuous-time attention do better than attention that uses order alone?

Users are split apart, and the information that a model has is named in every row: the past alone, or also the time of
the predicted event, as in published work, which helps by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from keyquery.capture.load import pick_device
from keyquery.estimators.events.model import EventModel
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.files import write_all
from keyquery.support.progress import Progress
from keyquery_studies.common.rows import firsts, over_seeds
from keyquery_studies.common.runner import device_name, run_jobs, study_folder
from keyquery_studies.common.store import array_file, digest_of, npz_bytes, result_name
from keyquery_studies.time.event_files import READERS, Timed

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
TEST = 0.2  # of the groups, the same ones for every seed
SETTING = ("dataset", "time", "how", "calendar", "information")
FIGURES = ("accuracy", "nll_type", "nll_gap")


@dataclass(frozen=True, kw_only=True)
class TimeStudy(Reading, kind="time study"):
    """Prediction of next events on unseen groups, per training, and by counts alone."""

    rows: Sequence[Mapping[str, Any]]  # one per training
    counts: Sequence[Mapping[str, Any]]  # one a set and a way to count

    def records(self) -> list[dict[str, Any]]:
        """One row per training, and one per counting baseline."""
        return [dict(row) for row in (*self.counts, *self.rows)]

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

    @classmethod
    def joined(cls, *parts: TimeStudy) -> TimeStudy:
        """One reading of separate runs."""
        return cls(
            rows=firsts((row for part in parts for row in part.rows), (*SETTING, "seed", "digest")),
            counts=firsts((row for part in parts for row in part.counts), ("dataset", "by")),
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
        learned, test = _split(folder / array_file(self.dataset, self.digest))
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


@lru_cache(maxsize=2)
def _split(path: Path) -> tuple[Timed, Timed]:
    """Events of groups to learn from, and of groups to test on."""
    with np.load(path, allow_pickle=False) as arrays:
        events = Timed(arrays["types"], arrays["times"], arrays["groups"])
    names = np.unique(events.groups)
    chosen = np.random.default_rng(0).permutation(names)[: round(TEST * len(names))]
    apart = np.isin(events.groups, chosen)
    learned, test = (Timed(events.types[rows], events.times[rows], events.groups[rows]) for rows in (~apart, apart))
    return learned, test


def prepare(sources: Mapping[str, str | Path], folder: Path) -> dict[str, dict[str, Any]]:
    """Facts of every set, whose columns are put into `folder`."""
    facts, contents = {}, dict[str | Path, str | bytes]()
    for dataset, path in sources.items():
        check_choice("dataset", dataset, tuple(READERS))
        events = READERS[dataset](path)
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
