"""Study `datapoints`: cross-row attention compared with gradient-boosted trees, nearest neighbours and MLPs.

The claims: a network that sees the whole table is as accurate as gradient-boosted trees; it uses other rows, so it
errs more where those are corrupted; and it can learn to look a target up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from time import time
from typing import Any

from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.rows import firsts
from keyquery_studies.common.runner import Job, device_name, run_parts, study_folder
from keyquery_studies.datapoints.baselines import MODELS, Baseline
from keyquery_studies.datapoints.contrasts import contrasts
from keyquery_studies.datapoints.grid import CELLS, GridTrial, cell_of
from keyquery_studies.datapoints.lookups import VARIANTS, LookUp
from keyquery_studies.datapoints.tables import SMALL, TABLES, prepare_tables
from keyquery_studies.datapoints.trial import PRECISIONS, PROTOCOLS, PUBLISHED, TableTrial, settings_of

PARTS = ("npt", "kernels", "baselines", "lookup", "grid", "all")
KERNELS = ("general", "symmetric", "psd", "skew", "split")
ORDER = (*PROTOCOLS, *MODELS, *KERNELS, *VARIANTS, *(cell_of(*cell) for cell in CELLS))
FIGURES = ("rmse", "accuracy", "auroc", "nll")
FEW = {"yacht": 3, "concrete": 3}  # default folds of tables that are trained for 10,000 steps
COMPARED: dict[str, Any] = {
    "tables": ("boston", "breast"),
    "folds": (0, 1, 2),
    "embedding": 32,
    "steps": 1000,
}  # of kernels
GRID: dict[str, Any] = {"tables": ("yacht", "concrete"), "embedding": 64, "steps": 1500}  # transduction × masking
BYTES, PRODUCTS = 27e-12, 2e-14  # seconds a weight and a step, and more for each row: what takes longest comes first
# Published: figures of the network and of other models (CatBoost of boosting), mean and standard error over folds, and
# by how much errors grow where other rows are corrupted. Of tables that are here in part there are none.
CLAIMS: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {
    "boston": {
        "published": {"rmse": (2.92, 0.15)},
        "boosting": {"rmse": (3.44, 0.34)},
        "neighbours": {"rmse": (4.27, 0.37)},
        "perceptron": {"rmse": (3.32, 0.39)},
    },
    "yacht": {
        "published": {"rmse": (1.27, 0.15)},
        "boosting": {"rmse": (1.05, 0.16)},
        "neighbours": {"rmse": (12.02, 0.65)},
        "perceptron": {"rmse": (0.91, 0.13)},
    },
    "concrete": {
        "published": {"rmse": (5.21, 0.20)},
        "boosting": {"rmse": (4.28, 0.16)},
        "neighbours": {"rmse": (8.51, 0.30)},
        "perceptron": {"rmse": (5.53, 0.20)},
    },
    "breast": {"published": {"accuracy": (0.9473, 0.0069), "auroc": (0.997, 0.001), "nll": (0.137, 0.026)}},
    "protein": {
        "published": {"rmse": (3.41, None)},
        "boosting": {"rmse": (3.51, None)},
        "neighbours": {"rmse": (3.77, None)},
        "perceptron": {"rmse": (3.62, None)},
    },
}
GROWTH = {"boston": 0.20, "yacht": 0.52, "concrete": 0.07, "breast": 0.0, "protein": 0.21}


@dataclass(frozen=True, kw_only=True)
class DatapointStudy(Reading, kind="datapoint study"):
    """Test errors per training, and how networks use other rows."""

    npt: Sequence[Mapping[str, Any]]  # one per training: a table, a fold, a protocol
    kernels: Sequence[Mapping[str, Any]]  # the same, by the kernel between rows
    baselines: Sequence[Mapping[str, Any]]  # one per scikit-learn model, on the same folds
    lookup: Sequence[Mapping[str, Any]]  # one per look-up variant and change of the table
    grid: Sequence[Mapping[str, Any]] = ()  # one per training: transduction × masked targets

    def records(self) -> list[dict[str, Any]]:
        """One row per training or model, named by its part; curves and heads are in the JSON only."""
        parts = {"npt": self.npt, "kernels": self.kernels, "baselines": self.baselines, "lookup": self.lookup}
        parts["grid"] = self.grid
        return [
            {"part": part, **{key: value for key, value in row.items() if not isinstance(value, (list, dict))}}
            for part, rows in parts.items()
            for row in rows
        ]

    def summary(self) -> list[dict[str, Any]]:
        """Mean and standard error over folds of every metric, per table and model; unfinished trainings are left out.

        `grows` is by what share the RMSE grows beside corrupted rows, from the means over folds, and of classes how
        many more are wrong, a share of all. `symmetric` and `on_data` are means over the heads between rows, each with
        what it was before training.
        """
        rows = [{**row, "part": part, "model": _called(row)} for part, row in self._told()]
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault((row["part"], row["table"], row["model"]), []).append(row)
        summaries = []
        for (part, table, model), alike in groups.items():
            summary: dict[str, Any] = {"part": part, "table": table, "model": model, "folds": len(alike)}
            for name in FIGURES:
                summary |= over_folds(name, [row.get(name) for row in alike])
            summaries.append({**summary, **_grown(alike), **_heads(alike)})
        return summaries

    def contrasts(self) -> list[dict[str, Any]]:
        """Paired by fold; p by Holm within the models, the grid, and the corrupted rows."""
        return contrasts(self.npt, self.baselines, self.grid)

    def _told(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        parts = {"npt": self.npt, "kernels": self.kernels, "baselines": self.baselines, "grid": self.grid}
        return ((part, row) for part, rows in parts.items() for row in rows if not row.get("partial"))

    @classmethod
    def joined(cls, *parts: DatapointStudy) -> DatapointStudy:
        """One reading of separate runs; of the same training, the longest run counts."""

        def longest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
            return firsts(sorted(rows, key=lambda row: -(row.get("steps_run") or 0)), ("name",))

        fields = ("npt", "kernels", "baselines", "lookup", "grid")
        rows_of: dict[str, Any] = {
            name: sorted(longest(row for part in parts for row in getattr(part, name)), key=_place) for name in fields
        }
        return cls(**rows_of, provenance={"runs": [part.provenance for part in parts]})


def _place(row: Mapping[str, Any]) -> tuple[int, ...]:
    """In the order of tables, models and folds."""
    table = list(TABLES).index(row["table"]) if "table" in row else 0
    return (table, ORDER.index(_called(row)), row.get("fold", 0))


def _called(row: Mapping[str, Any]) -> str:
    """A protocol, a kernel, or a model of scikit-learn."""
    if "masked" in row:
        return cell_of(row["transductive"], row["masked"])
    for key in ("model", "variant"):
        if key in row:
            return str(row[key])
    return str(row["protocol"] if row["kernel"] == "general" and row["part_of"] == "npt" else row["kernel"])


def over_folds(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """A figure's mean and standard error, the standard deviation over √n; None where a fold has none."""
    there = [value for value in values if value is not None]
    if len(there) < len(values) or not there:
        return {name: None, f"{name}_se": None}
    spread = stdev(there) / math.sqrt(len(there)) if len(there) > 1 else None
    return {name: mean(there), f"{name}_se": spread}


def _grown(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """By how much errors grow where other rows are corrupted."""
    if any("corrupted" not in row for row in rows):
        return {"grows": None, "grows_se": None}
    if "rmse" in rows[0]["corrupted"]:
        each = [row["corrupted"]["rmse"] / row["clean"]["rmse"] - 1 for row in rows]
        whole = mean(row["corrupted"]["rmse"] for row in rows) / mean(row["clean"]["rmse"] for row in rows) - 1
        return {**over_folds("grows", each), "grows": whole}
    return over_folds("grows", [row["clean"]["accuracy"] - row["corrupted"]["accuracy"] for row in rows])


def _heads(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """What heads between rows are like, each fold's mean first."""
    if any("row_heads" not in row for row in rows):
        return {}
    means: dict[str, float | None] = {}
    for name in ("symmetric", "on_data"):
        means |= over_folds(name, [mean(head[name] for head in row["row_heads"]) for row in rows])
        before = [mean(head["at_start"][name] for head in row["row_heads"]) for row in rows]
        means[f"{name}_at_start"] = mean(before)
    return means


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained."""

    part: str = "all"
    tables: tuple[str, ...] = SMALL
    folds: tuple[int, ...] = ()  # none: all ten of Boston and breast cancer, three of Yacht and Concrete
    protocols: tuple[str, ...] = PROTOCOLS
    kernels: tuple[str, ...] = KERNELS
    steps: int | None = None  # None: set by the protocol
    embedding: int | None = None
    depth: int = 8
    precision: str | None = None
    seed: int = 0
    minutes: float | None = None  # after which all trainings are interrupted

    def __post_init__(self) -> None:
        for name in ("tables", "folds", "protocols", "kernels"):  # duplicates are dropped
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        check_choice("part", self.part, PARTS)
        for table in self.tables:
            check_choice("table", table, tuple(TABLES))
        for protocol in self.protocols:
            check_choice("protocol", protocol, PROTOCOLS)
        for kernel in self.kernels:
            check_choice("kernel", kernel, KERNELS)
        if self.precision is not None:
            check_choice("precision", self.precision, PRECISIONS)
        if self.minutes is not None and not self.minutes >= 0:
            raise ValueError(f"minutes must be at least 0, got {self.minutes}")
        facts = {table: {"digest": "", "rows": 1, "features": 1} for table in self.tables}
        self.trainings(facts, None)  # validates the settings

    def has(self, part: str) -> bool:
        """Whether a part is requested."""
        return self.part in (part, "all")

    def folds_of(self, table: str) -> tuple[int, ...]:
        """The requested folds that the table has."""
        count = TABLES[table].folds
        return tuple(fold for fold in self.folds if fold < count) or tuple(range(FEW.get(table, count)))

    def trainings(self, facts: Mapping[str, Mapping[str, Any]], deadline: float | None) -> list[TableTrial]:
        """Every protocol on every fold; the longest first, so that no worker is left waiting for it."""
        trials = [
            self._trial(facts, deadline, table=table, fold=fold, protocol=protocol, **settings_of(table, protocol))
            for table in self.tables
            for protocol in self.protocols
            if protocol != "published" or table in PUBLISHED
            for fold in self.folds_of(table)
        ]
        return sorted(trials, key=lambda trial: -_cost(trial, facts[trial.table]))

    def compared(self, facts: Mapping[str, Mapping[str, Any]], deadline: float | None) -> list[TableTrial]:
        """Every kernel between rows, on a few folds; smaller networks, and fewer steps."""
        shape = {**settings_of("boston", "inductive"), "embedding": COMPARED["embedding"], "steps": COMPARED["steps"]}
        return [
            self._trial(facts, deadline, table=table, fold=fold, kernel=kernel, **shape)
            for table in self.tables
            if table in COMPARED["tables"]
            for fold in self.folds or COMPARED["folds"]
            for kernel in self.kernels
        ]

    def _trial(self, facts: Mapping[str, Mapping[str, Any]], deadline: float | None, **settings: Any) -> TableTrial:
        own = {"steps": self.steps, "embedding": self.embedding, "precision": self.precision}
        settings |= {name: value for name, value in own.items() if value is not None}
        sizes: dict[str, Any] = {"digest": facts[settings["table"]]["digest"], "depth": self.depth, "seed": self.seed}
        return TableTrial(**settings, **sizes, deadline=deadline)

    def fitted(self, facts: Mapping[str, Mapping[str, Any]], deadline: float | None) -> list[Baseline]:
        """Every model of scikit-learn on the folds that networks are trained on."""
        return [
            Baseline(
                table=table, digest=facts[table]["digest"], fold=fold, model=model, seed=self.seed, deadline=deadline
            )
            for table in self.tables
            for fold in self.folds_of(table)
            for model in MODELS
        ]

    def crossed(self, facts: Mapping[str, Mapping[str, Any]], deadline: float | None) -> list[GridTrial]:
        """The four cells of transduction × masked targets, fold after fold; all folds unless some are named."""
        return [
            GridTrial(
                table=table,
                digest=facts[table]["digest"],
                fold=fold,
                transductive=transductive,
                masked=masked,
                steps=self.steps or GRID["steps"],
                embedding=self.embedding or GRID["embedding"],
                depth=self.depth,
                seed=self.seed,
                deadline=deadline,
            )
            for table in self.tables
            if table in GRID["tables"]
            for fold in self.folds or range(TABLES[table].folds)
            for transductive, masked in CELLS
        ]

    def lookups(self, deadline: float | None) -> list[LookUp]:
        """Every change of the table, and once without attention between rows."""
        usual: dict[str, Any] = {"seed": self.seed, "deadline": deadline}
        usual |= {} if self.steps is None else {"steps": self.steps}
        jobs = [LookUp(variant=variant, **usual) for variant in VARIANTS]
        return [*jobs, LookUp(variant="plain", rows="none", **usual)]


def _cost(trial: TableTrial, facts: Mapping[str, Any]) -> float:
    """Approximate seconds on a GPU."""
    weights = trial.depth / 2 * 13 * ((facts["features"] + 1) * trial.embedding) ** 2
    return weights * trial.steps * (BYTES + PRODUCTS * facts["rows"])


def run(
    data: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    progress: Progress | None = None,
) -> DatapointStudy:
    """Train according to the plan, test fold by fold, and measure what other rows contribute.

    `data` is a folder of tables under their usual names. With `out` every result is kept there: finished trainings are
    not repeated, and those stopped by `plan.minutes` resume. `workers` processes share the device; scikit-learn models
    run on the CPU.

    Parameters
    ----------
    data
        A folder of tables under their usual names. Default: none.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    plan
        What to train. Default: the whole study.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    DatapointStudy
        A Reading.
    """
    plan = plan or Plan()
    check_count("workers", workers)
    chosen = pick_device(device)
    deadline = None if plan.minutes is None else time() + 60 * plan.minutes
    with study_folder(out) as folder:
        facts = {} if plan.part == "lookup" else prepare_tables(data, folder, plan.tables)
        jobs: dict[str, Sequence[Job]] = {
            "npt": plan.trainings(facts, deadline) if plan.has("npt") else [],
            "kernels": plan.compared(facts, deadline) if plan.has("kernels") else [],
            "lookup": plan.lookups(deadline) if plan.has("lookup") else [],
            "baselines": plan.fitted(facts, deadline) if plan.has("baselines") else [],
            "grid": plan.crossed(facts, deadline) if plan.part == "grid" else [],
        }
        rows = run_parts(jobs, folder, chosen, workers, progress)
    results: dict[str, Any] = {
        part: sorted(
            ({**row, "name": job.name, "part_of": part} for row, job in zip(rows[part], jobs[part], strict=True)),
            key=_place,
        )
        for part in jobs
    }
    return DatapointStudy(
        **results,
        provenance=provenance(plan=asdict(plan), tables=facts, device=device_name(chosen), workers=workers),
    )
