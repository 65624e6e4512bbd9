"""Study `transport`: is optimal transport a way to train, and does training follow it?

A classifier whose map is learned from optimal transport is held against Transformers and plainer methods; Transformers
are followed through training; and their last maps are pre-trained on synthetic points.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.comparisons import corrected, difference
from keyquery_studies.common.rows import over_seeds
from keyquery_studies.common.runner import device_name, run_parts, study_folder
from keyquery_studies.common.store import result_name
from keyquery_studies.transport.baselines import HELD_OUT, METHODS, PATIENCE, RECIPES, STEPS, learn
from keyquery_studies.transport.cost import costing
from keyquery_studies.transport.datasets import HELD_OUT as TESTED
from keyquery_studies.transport.datasets import ROWS, SETS, SIMULATED, bayes, keep_adult, split_of
from keyquery_studies.transport.trajectories import FIGURES, STARTS, CourseTrial, StartTrial

PARTS = ("accuracy", "course", "start")
FOLLOWED = [(kind, classes, i) for kind in ("published", "transformer") for classes in (2, 3) for i in (1, 4)]
BEGUN = [(2, 1), (3, 1)]


@dataclass(frozen=True, kw_only=True)
class TransportStudy(Reading, kind="transport study"):
    """Accuracy and cost of every method, trajectories of Transformers, and the effect of a pre-trained head."""

    rows: Sequence[Mapping[str, Any]]  # one per training of one method on one set
    courses: Sequence[Mapping[str, Any]]  # one per training that was followed; `starts` by where it is followed from
    begun: Sequence[Mapping[str, Any]]  # one per training with or without a pre-trained head

    def records(self) -> list[dict[str, Any]]:
        """One row per training: of accuracy, of a trajectory, and of a pre-trained head."""
        records = [{"part": "accuracy", **row} for row in self.rows]
        records += [{"part": "course", **row} for row in self._courses()]
        return records + [{"part": "start", **{k: v for k, v in row.items() if k != "curve"}} for row in self.begun]

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds, one row per dataset and method.

        `gap` is the accuracy less that of the Transformer of the same seed; `times` how many times less CPU time.
        `best` is the accuracy of Bayes' rule, where it is known.
        """
        rows = []
        for row in self.rows:
            at = (row["dataset"], "transformer", row["seed"])
            base = next((o for o in self.rows if (o["dataset"], o["method"], o["seed"]) == at), None)
            comparison = {"gap": None, "times": None}
            if base is not None:
                comparison = {"gap": row["accuracy"] - base["accuracy"], "times": base["seconds"] / row["seconds"]}
            rows.append({**row, **comparison})
        figures = ("accuracy", "seconds", "megabytes", "gap", "times")
        summaries = over_seeds(rows, ("dataset", "method"), figures)
        return [
            {**row, "best": bayes(*SIMULATED[row["dataset"]]) if row["dataset"] in SIMULATED else None}
            for row in summaries
        ]

    def contrasts(self) -> list[dict[str, Any]]:
        """Paired by seed: accuracy of `ot` less that of each other method, p by Holm over the datasets of a method;
        and epochs with a pre-trained head less those without, p by Holm over all."""
        sets = dict.fromkeys(row["dataset"] for row in self.rows)

        def runs(name: str, method: str) -> list[Mapping[str, Any]]:
            return [row for row in self.rows if (row["dataset"], row["method"]) == (name, method)]

        def begun(name: str, start: str) -> list[Mapping[str, Any]]:
            return [row for row in self.begun if (row["dataset"], row["start"]) == (name, start)]

        rows = []
        for other in dict.fromkeys(row["method"] for row in self.rows if row["method"] != "ot"):
            both = [name for name in sets if runs(name, "ot") and runs(name, other)]
            of = [{"of": "accuracy", "dataset": name, "arm": "ot", "less": other} for name in both]
            pairs = [(runs(name, "ot"), runs(name, other)) for name in both]
            rows += corrected([o | difference(*pair, "accuracy") for o, pair in zip(of, pairs, strict=True)])
        starts = list(dict.fromkeys((r["dataset"], r["start"]) for r in self.begun if r["start"] != "none"))
        epochs = [difference(begun(name, start), begun(name, "none"), "reached") for name, start in starts]
        of = [{"of": "epochs", "dataset": name, "arm": start, "less": "none"} for name, start in starts]
        return rows + corrected([one | row for one, row in zip(of, epochs, strict=True)])

    def followed(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds, one row per network, dataset and starting point of the trajectory."""
        names = (*FIGURES, "by_lot", "shape", "shape_by_lot", "published", "accuracy")
        return over_seeds(self._courses(), ("network", "start", "classes", "i"), names)

    def starts(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds, one row per dataset and initialisation: epochs to convergence, and accuracy."""
        return over_seeds(self.begun, ("dataset", "start"), ("reached", "accuracy"))

    def _courses(self) -> list[dict[str, Any]]:
        return [
            {**{key: value for key, value in row.items() if key != "starts"}, "start": start, **metrics}
            for row in self.courses
            for start, metrics in row["starts"].items()
        ]


@dataclass(frozen=True, kw_only=True)
class MethodTrial:
    """One method trained on one dataset."""

    dataset: str
    method: str
    seed: int
    digest: str | None = None  # of data that come from files
    limit: int | None = None  # of a network's epochs, in place of its own

    @property
    def name(self) -> str:
        """The name of its result file."""
        design = {"rows": ROWS, "held_out": [HELD_OUT, TESTED], "patience": PATIENCE, "steps": STEPS}
        design["recipe"] = RECIPES.get(self.method)
        settings = {name: value for name, value in asdict(self).items() if name != "limit" or value is not None}
        return result_name((self.dataset, self.method, self.seed), {**settings, "design": design})

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Fit, once on a little to have all that is needed set up, and test."""
        data = split_of(self.dataset, self.seed, folder, self.digest)
        with warnings.catch_warnings():  # about classes matched in mini-batches, as documented
            warnings.filterwarnings("ignore", "a class of")
            few = slice(0, 60)
            learn(self.method, data.x[few], data.y[few], self.seed, device, epochs=1)
            whole = (data.x, data.y, self.seed, device, self.limit)
            learned, cost = costing(lambda: learn(self.method, *whole), device)
        return {
            **asdict(self),
            "accuracy": float((learned.predict(data.test_x) == data.test_y).mean()),
            **cost._asdict(),
            **learned.facts,
            "learned": len(data.y),
            "tested": len(data.test_y),
            "device": device_name(device),
        }


def methods_of(dataset: str) -> tuple[str, ...]:
    """All methods; the simplex where it is not the circle turned."""
    return METHODS if dataset == "digits" else tuple(method for method in METHODS if method != "simplex")


def run(
    data: str | Path | None = None,
    out: str | Path | None = None,
    part: str = "all",
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    sets: Sequence[str] = (),
    epochs: int | None = None,
    device: str = "auto",
    workers: int = 1,
    progress: Progress | None = None,
) -> TransportStudy:
    """Run the study, or one `part` of it: "accuracy", "course" or "start".

    `data` is a folder with uci_adult_train.csv and uci_adult_test.csv, compressed or not; without it, Adult is left
    out. `sets` are those of the first part (default: all); `epochs` replaces the number of epochs of every network.
    With `out`, every result is kept there, and nothing is computed twice. Needs the extras `estimators` and
    `transport`.

    Parameters
    ----------
    data
        A folder with the tables of Adult. Default: Adult is left out.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    part
        "accuracy", "course", "start" or "all".
    seeds
        One training each.
    sets
        Datasets of the first part. Default: all.
    epochs
        Of every network. Default: those of the study.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    TransportStudy
        A Reading.
    """
    check_choice("part", part, (*PARTS, "all"))
    check_count("workers", workers)
    check_count("epochs", epochs, optional=True)
    chosen, wanted = pick_device(device), tuple(sets) or tuple(name for name in SETS if name != "adult" or data)
    for name in wanted:
        check_choice("set", name, SETS)
    if "adult" in wanted and data is None and part in ("accuracy", "all"):
        raise ValueError(
            "adult needs a folder with uci_adult_train.csv and uci_adult_test.csv: pass it as data (--data)"
        )
    runs = tuple(dict.fromkeys(seeds))
    with study_folder(out) as folder:
        facts = dict[str, Any]()
        if "adult" in wanted and part in ("accuracy", "all"):
            facts["adult"] = keep_adult(str(data), folder)
        jobs = _jobs(part, wanted, runs, facts, {} if epochs is None else {"epochs": epochs})
        rows = run_parts(jobs, folder, chosen, workers, progress)
    return TransportStudy(
        rows=rows["accuracy"],
        courses=rows["course"],
        begun=rows["start"],
        provenance=provenance(sets=facts, device=device_name(chosen), recipes=RECIPES, seeds=runs),
    )


def _jobs(
    part: str, sets: Sequence[str], seeds: Sequence[int], facts: Mapping[str, Any], options: dict[str, int]
) -> dict[str, list[Any]]:
    """Trials of every part, ordered by seed, so that an interrupted run has complete ones."""
    accuracy = [
        MethodTrial(
            dataset=name,
            method=method,
            seed=seed,
            digest=facts.get(name, {}).get("digest"),
            limit=options.get("epochs"),
        )
        for seed in seeds
        for name in sets
        for method in methods_of(name)
    ]
    course = [
        CourseTrial(network=kind, classes=k, i=i, seed=seed, **options) for seed in seeds for kind, k, i in FOLLOWED
    ]
    start = [
        StartTrial(start=way, classes=k, i=i, seed=seed, **options)
        for seed in seeds
        for k, i in BEGUN
        for way in STARTS
    ]
    by_part: dict[str, list[Any]] = {"accuracy": accuracy, "course": course, "start": start}
    return {name: jobs if part in (name, "all") else [] for name, jobs in by_part.items()}
