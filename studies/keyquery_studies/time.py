"""Study `time`: where must time enter a model of events: as an input, in the attention scores, or both?

The next event of unseen users is predicted by four models of equal size. Earlier designs, whose rows the published
reading holds, and the best possible loss of the simulation were run at commit 7792c819.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from keyquery.learn.events.model import EventModel
from keyquery.learn.events.network import EventNetwork
from keyquery.support.files import write_all
from keyquery_studies.common.comparisons import corrected, difference
from keyquery_studies.common.events import Timed, read_badges, read_cdnow, read_retail
from keyquery_studies.common.rates import tuned
from keyquery_studies.common.rows import over_seeds, selected
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.show import lines as lines
from keyquery_studies.common.store import array_file, digest_of, npz_bytes
from keyquery_studies.common.study import Rows, Study, StudyReading, Train, Trial, option

# Where an arm sees time: the gap before an event as an input, and Mercer's encoding in the scores.
ARMS = {"order": (False, False), "gap": (True, False), "kernel": (False, True), "both": (True, True)}
CONTRASTS = (("gap", "order"), ("kernel", "order"), ("both", "gap"))
METRICS = ("accuracy", "nll_type", "nll_gap")
RATES = (1e-3, 4e-3, 1.6e-2)  # the first grid
SHAPE: dict[str, Any] = {"width": 32, "depth": 1, "heads": 2}
# The type is what is compared, hence the weight of the gap.
FIT: dict[str, Any] = {"window": 80, "gap_weight": 0.1, "patience": 5, "batch_size": 128}
READERS = {"badges": read_badges, "retail": read_retail, "cdnow": read_cdnow}
TEST = 0.2  # of the groups, the same ones for every seed
TYPES, BASE = 4, 0.05  # of the simulated Hawkes process: events per type and unit of time
# Type j raises the rate of itself and of the next type (row: what is raised): 0.8 further events per event.
EXCITATION = 0.6 * np.eye(TYPES) + 0.2 * np.roll(np.eye(TYPES), 1, axis=0)


@dataclass(frozen=True, kw_only=True)
class TimeStudy(StudyReading, kind="time study"):
    """Prediction of next events on unseen groups."""

    arms: Sequence[Mapping[str, Any]] = ()  # one per training of the four arms, with the arm's own learning rate
    rows: Sequence[Mapping[str, Any]] = ()  # one per training of an earlier design
    counts: Sequence[Mapping[str, Any]] = ()  # one per dataset and way to count
    exact: Mapping[str, float] = field(default_factory=dict)  # the true process on the test groups of the simulation

    def records(self) -> list[dict[str, Any]]:
        """One row per training, and one per counting baseline."""
        return [dict(row) for row in (*self.counts, *self.rows, *self.arms)]

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds of every arm."""
        return over_seeds(self.arms, ("dataset", "arm", "lr", "parameters"), METRICS)

    def contrasts(self) -> list[dict[str, Any]]:
        """Differences between arms in nats, paired by seed, p by Holm over all; negative: the first arm is better."""
        rows = []
        for dataset in dict.fromkeys(row["dataset"] for row in self.arms):
            trained = {arm: selected(self.arms, dataset=dataset, arm=arm) for arm in ARMS}
            for metric in METRICS[1:]:
                for arm, base in CONTRASTS:
                    change = difference(trained[arm], trained[base], metric)
                    rows.append({"dataset": dataset, "of": metric, "arm": arm, "less": base, **change})
        return corrected(rows)


class ArmModel(EventModel):
    """An `EventModel` with the gap as an input or without, and MLPs widened to the parameters of the largest arm."""

    gap_input = True

    def _network(self, types: int, floor: float, **further: Any) -> EventNetwork:
        shape: dict[str, Any] = {"types": types, **{name: getattr(self, name) for name in (*SHAPE, "time", "dropout")}}
        largest = size_of(EventNetwork(**{**shape, "time": "mercer"}))
        bare = size_of(EventNetwork(**shape, since=self.gap_input))
        hidden = 4 * self.width + round((largest - bare) / (self.depth * (2 * self.width + 1)))
        return EventNetwork(**shape, since=self.gap_input, floor=floor, hidden=hidden, **further)


def size_of(network: EventNetwork) -> int:
    """The number of parameters."""
    return sum(weight.numel() for weight in network.parameters())


@dataclass(frozen=True, kw_only=True)
class ArmTrial(Trial):
    """One arm, trained on four fifths of the groups until validation stops improving, tested on the others."""

    dataset: str
    digest: str
    arm: str
    seed: int
    lr: float = 2e-3
    epochs: int = 25

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train and evaluate."""
        learned, test = split(folder / array_file(self.dataset, self.digest))
        gap_input, kernel = ARMS[self.arm]
        options: dict[str, Any] = {"epochs": self.epochs, "lr": self.lr, "random_state": self.seed, "device": device}
        model = ArmModel(time="mercer" if kernel else "positions", **SHAPE, **FIT, **options)
        model.gap_input = gap_input
        start = perf_counter()
        model.fit(*learned)
        seconds = perf_counter() - start
        evaluated = model.evaluate(*test).rows[0]
        losses = [row["validation"] for row in model.history_]
        return {
            **self.settings(),
            **{name: evaluated[name] for name in METRICS},
            "validation": min(losses),
            "best_epoch": 1 + losses.index(min(losses)),
            "epochs_run": len(losses),
            "parameters": size_of(model.network_),
            "seconds": seconds,
            "device": device_name(device),
        }


@lru_cache(maxsize=2)
def split(path: Path) -> tuple[Timed, Timed]:
    """Events of groups to learn from, and of groups to test on."""
    with np.load(path, allow_pickle=False) as arrays:
        events = Timed(arrays["types"], arrays["times"], arrays["groups"])
    names = np.unique(events.groups)
    tested = np.isin(events.groups, np.random.default_rng(0).permutation(names)[: round(TEST * len(names))])
    learned, test = (Timed(*(column[rows] for column in events)) for rows in (~tested, tested))
    return learned, test


def simulate(groups: int = 1500, length: int = 60, seed: int = 0) -> Timed:
    """A Hawkes process of unit decay, `length` events per sequence, by Ogata's thinning."""
    random = np.random.default_rng(seed)
    types, times = np.empty((groups, length), dtype=np.int64), np.empty((groups, length))
    for group in range(groups):
        now, raised = 0.0, np.zeros(TYPES)
        for place in range(length):
            while True:
                bound = BASE * TYPES + raised.sum()  # the rate only falls until the next event
                gap = random.exponential(1 / bound)
                now, raised = now + gap, raised * np.exp(-gap)
                rates = BASE + raised
                if random.uniform() * bound < rates.sum():
                    break
            kind = random.choice(TYPES, p=rates / rates.sum())
            raised = raised + EXCITATION[:, kind]
            types[group, place], times[group, place] = kind, now
    return Timed(types.ravel(), times.ravel(), np.repeat(np.arange(groups), length))


@dataclass(frozen=True, kw_only=True)
class Time(Study):
    """What does time add over the order of events, and where must it enter?

    Four models of equal size see time nowhere, as an input, in the attention scores or in both, each at its own
    learning rate, on the given files and on a simulated Hawkes process. Two minutes per training run on one core.
    """

    result = TimeStudy

    badges: Path | None = option(None, "Stack Overflow badges: an .npz with time, event and offsets.")
    retail: Path | None = option(None, "Online Retail: its .csv, plain or compressed.")
    cdnow: Path | None = option(None, "CDNOW: its master file, plain or compressed.")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "A seed.", "seed")
    rates: tuple[float, ...] = option(RATES, "A learning rate of the first grid.", "rate")
    epochs: int = option(25, "Maximum number of epochs, with early stopping.", least=1)

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """Facts of every dataset, whose columns are put into `folder`."""
        paths = {"badges": self.badges, "retail": self.retail, "cdnow": self.cdnow}
        events = {name: READERS[name](path) for name, path in paths.items() if path is not None}
        facts, contents = {}, dict[str | Path, str | bytes]()
        for name, columns in (events | {"hawkes": simulate()}).items():
            digest = digest_of(*columns)
            contents[folder / array_file(name, digest)] = npz_bytes(columns._asdict())
            sizes = {"events": len(columns.types), "groups": len(np.unique(columns.groups))}
            facts[name] = {"digest": digest, **sizes, "types": len(np.unique(columns.types))}
        folder.mkdir(parents=True, exist_ok=True)
        write_all(contents)
        return {"sets": facts}

    def rows(self, facts: Mapping[str, Any], train: Train) -> Rows:
        """The rates of every arm on every dataset with the first seed, then the best rate with all seeds."""
        first = [
            ArmTrial(dataset=name, digest=about["digest"], arm=arm, seed=self.seeds[0], epochs=self.epochs)
            for name, about in facts["sets"].items()
            for arm in ARMS
        ]
        best = tuned(first, self.rates, train)
        return {"arms": train([replace(trial, seed=seed) for seed in self.seeds for trial in best])}
