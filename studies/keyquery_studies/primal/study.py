"""Study `primal`: Primal-Attention compared with fused softmax, on time series and long sequences.

The claims: it matches or exceeds the accuracy of softmax (Primal.+, where only the last layer is primal, more so), and
is two to seven times as fast as a softmax that materialises every score.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean
from time import time
from typing import Any

from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.comparisons import corrected, difference
from keyquery_studies.common.rows import firsts, over_seeds
from keyquery_studies.common.runner import Job, device_name, run_jobs, run_parts, study_folder
from keyquery_studies.primal.arena.model import ATTENTIONS
from keyquery_studies.primal.arena.side_by_side import RATES, SAMPLINGS, SIDES, compared
from keyquery_studies.primal.arena.speed import Speed
from keyquery_studies.primal.arena.tasks import GENERATORS, TASKS, prepare_arena
from keyquery_studies.primal.arena.text_training import TextRun
from keyquery_studies.primal.arena.training import ArenaTraining
from keyquery_studies.primal.uea_series import PROTOCOLS, VARIANTS, SeriesTrial, prepare_series, published_settings

PARTS = ("series", "ablation", "arena", "speed", "text", "all")  # all: without text
SHARES = {"listops": 1.0, "text": 1.0, "image": 0.2, "pathfinder": 0.2}  # of the published steps; defaults
SERIES = ("dataset", "attention", "protocol", "variant", "width", "rank", "eta", "epochs", "digest")
ETA = 0.1  # for ablations where the published eta is 0, so that there is a loss to ablate
ARENA = ("task", "attention", "share", "schedule", "start", "steps", "batch", "data")
TEXT = ("attention", "lr", "seed", "length", "steps", "batch", "data")
SHORT = {"length": 1024, "steps": 1200}  # of the part text


@dataclass(frozen=True, kw_only=True)
class PrimalStudy(Reading, kind="primal study"):
    """Results per training for primal attention and softmax, and the time per step."""

    series: Sequence[Mapping[str, Any]]  # one per training on a time-series dataset
    ablation: Sequence[Mapping[str, Any]]  # the same, for primal attention with one component ablated
    arena: Sequence[Mapping[str, Any]]  # one per training on a task of the arena
    speed: Sequence[Mapping[str, Any]]  # one per task, each with `rows`, one per attention
    text: Sequence[Mapping[str, Any]] = ()  # one per training on shortened texts, beside the released layer

    def records(self) -> list[dict[str, Any]]:
        """One row per training and per timed step, named by its part; curves and spectra are in the JSON only."""
        parts = {"series": self.series, "ablation": self.ablation, "arena": self.arena, "speed": self._timed()}
        parts["text"] = list(self.text)
        return [
            {"part": part, **{key: value for key, value in row.items() if not isinstance(value, (list, dict))}}
            for part, rows in parts.items()
            for row in rows
        ]

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds of every accuracy, and time per step; the rows of one part have the same keys.

        Accuracies are fractions, published ones too. `share_run` is the fraction of the published steps, `schedule_run`
        of a run's own: below 1 it was stopped early, before its learning rate had decayed.
        """
        means = over_seeds(self._trials(), ("part", *SERIES), ("accuracy", "last_accuracy"))
        rows = [{key: value for key, value in row.items() if key != "digest"} for row in means]
        means = over_seeds(self.arena, ARENA, ("accuracy", "validation", "share_run", "schedule_run", "published"))
        keys = {"published_sd", "schedule_run_sd", "data", "steps", "batch"}
        rows += [{"part": "arena", **{k: v for k, v in row.items() if k not in keys}} for row in means]
        rows += [{"part": "speed", **row} for row in self._timed()]
        means = over_seeds(self.text, [key for key in TEXT if key != "seed"], ("accuracy",))
        return rows + [{"part": "text", **{k: v for k, v in row.items() if k != "data"}} for row in means]

    def contrasts(self) -> list[dict[str, Any]]:
        """Accuracies paired by seed, p by Holm within a part: primal less softmax on series, and the arms of Text."""
        rows = []
        sets = dict.fromkeys(row["dataset"] for row in self.series)
        for name, protocol, attention in product(sets, PROTOCOLS, ATTENTIONS[:2]):
            one, other = (self._runs(name, arm, protocol) for arm in (attention, "general"))
            if one and other:
                of = {"part": "series", "dataset": name, "protocol": protocol, "attention": attention}
                rows.append({**of, "less": "general", **difference(one, other, "accuracy")})
        return [*corrected(rows), *corrected(self._texts())]

    def _texts(self) -> list[dict[str, Any]]:
        """The arms of Text, paired by seed, in every setting."""
        rows = []
        pairs = [("primal", "general"), ("released", "general"), ("primal", "released")]
        pairs += [(name, name.split(",")[0]) for name in SAMPLINGS]
        for length, (own, base) in product(sorted({row["length"] for row in self.text}), pairs):
            short = [row for row in self.text if row["length"] == length]
            one, other = (_most([row for row in short if row["attention"] == name]) for name in (own, base))
            if one and other:
                of = {"part": "text", "dataset": f"text, {length:,}", "protocol": "held out", "attention": own}
                rows.append({**of, "less": base, **difference(one, other, "accuracy")})
        return rows

    def protocols(self) -> list[dict[str, Any]]:
        """What the published protocol adds on each dataset, in accuracy: more training data, and epochs by test data.

        Differences of the last epoch's accuracy, and of the chosen epoch's to it; paired by seed, mean over attentions.
        """
        rows = []
        for name in dict.fromkeys(row["dataset"] for row in self.series):
            own = {protocol: self._mean(name, protocol) for protocol in PROTOCOLS}
            held, published = (own[protocol] for protocol in ("held out", "published"))
            if held and published:
                pairs = {"data": (published, held, "last"), "epoch": (published, published, "gain")}
                for factor, (one, other, key) in pairs.items():
                    other = [{**row, "gain": 0.0} for row in other] if key == "gain" else other
                    rows.append({"dataset": name, "factor": factor, **difference(one, other, key)})
        return corrected(rows)

    def _mean(self, dataset: str, protocol: str) -> list[dict[str, Any]]:
        """Per seed, the mean over attentions of the last accuracy, and of the gain by choosing the epoch."""
        runs = [row for row in self.series if (row["dataset"], row["protocol"]) == (dataset, protocol)]
        rows = []
        for seed in dict.fromkeys(row["seed"] for row in runs):
            own = [row for row in runs if row["seed"] == seed]
            gains = [row["accuracy"] - row["last_accuracy"] for row in own]
            rows.append({"seed": seed, "last": fmean(row["last_accuracy"] for row in own), "gain": fmean(gains)})
        return rows

    def _runs(self, dataset: str, attention: str, protocol: str) -> list[Mapping[str, Any]]:
        wanted = (dataset, attention, protocol)
        return [row for row in self.series if (row["dataset"], row["attention"], row["protocol"]) == wanted]

    def _trials(self) -> list[dict[str, Any]]:
        """Rows on time series by part: a training shared by both parts counts as one seed of each."""
        parts = {"series": self.series, "ablation": self.ablation}
        return [{"part": part, **row} for part, rows in parts.items() for row in rows]

    def _timed(self) -> list[dict[str, Any]]:
        missing = {"ms": None, "ms_low": None, "ms_high": None, "busy_ms": None, "peak_bytes": None, "note": None}
        missing |= dict.fromkeys(("faster", "faster_low", "faster_high", "faster_than_eager", "published_faster"))
        return [
            {"task": run["task"], "device": run["device"], **missing, **row}
            for run in self.speed
            for row in run["rows"]
        ]

    def decays(self) -> list[dict[str, Any]]:
        """Decay of the singular values of each layer's kernel, on time series: mean and sd over seeds.

        `start` and `trained` are the first value's share of the sum, before and after training: the former is the
        control, since the kernel's spectrum decays fast by construction. `start_most` and `trained_most` are the number
        of values that sum to nine tenths; None if more are needed than were recorded.
        """
        rows = [
            {**row, "layer": layer, **_steep("start", start), **_steep("trained", trained)}
            for row in self._trials()
            for layer, (start, trained) in enumerate(zip(*map(row["decay"].get, ("start", "trained")), strict=True))
            if start is not None and trained is not None
        ]
        return over_seeds(rows, ("part", *SERIES, "layer"), ("start", "trained", "start_most", "trained_most"))

    @classmethod
    def joined(cls, *parts: PrimalStudy) -> PrimalStudy:
        """One reading of separate runs; of the same training, the longest run is kept."""
        arena = sorted((row for part in parts for row in part.arena), key=lambda row: -row["steps_run"])
        longest = firsts(arena, (*ARENA, "seed"))
        order = {task: number for number, task in enumerate(TASKS)} | {name: i for i, name in enumerate(ATTENTIONS)}
        longest.sort(key=lambda row: (row["seed"], order[row["task"]], order[row["attention"]]))
        trial = (*SERIES, "seed")
        return cls(
            series=firsts((row for part in parts for row in part.series), trial),
            ablation=firsts((row for part in parts for row in part.ablation), trial),
            arena=longest,
            speed=firsts((row for part in parts for row in part.speed), ("task", "where")),
            text=firsts((row for part in parts for row in part.text), TEXT),
            provenance={"runs": [part.provenance for part in parts]},
        )


def _most(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the rate that most seeds were trained with."""
    groups = [[row for row in rows if row["lr"] == rate] for rate in dict.fromkeys(row["lr"] for row in rows)]
    return max(groups, key=len, default=[])


def _steep(name: str, shares: Sequence[float]) -> dict[str, Any]:
    """The first share, and the number of shares that sum to nine tenths."""
    enough = next((count for count, total in enumerate(accumulate(shares), 1) if total >= 0.9), None)
    return {name: shares[0], f"{name}_most": enough}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained and timed."""

    part: str = "all"
    tasks: tuple[str, ...] = tuple(TASKS)
    attentions: tuple[str, ...] = ()  # none: all of the part
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    datasets: tuple[str, ...] = ()  # time series; default: all in the data
    protocols: tuple[str, ...] = PROTOCOLS
    width: int = 512  # of networks on time series
    epochs: int = 100
    share: float | None = None  # of the arena's published steps; None: 1 for ListOps and Text, 0.2 for the others
    steps: int | None = None  # of a full training on the arena; None: as published
    batch: int | None = None
    schedule: str = "published"
    start: str = "published"
    examples: tuple[int, int, int] | None = None  # to generate; None: as published
    minutes: float | None = None  # time limit of a training on the arena
    repeats: int = 7  # of each timing
    length: int | None = None  # of the part text; None: 1,024 bytes
    rates: tuple[float, ...] = RATES  # of the part text: the first grid, or a single rate

    def __post_init__(self) -> None:
        for name in ("tasks", "attentions", "seeds", "datasets", "protocols"):  # duplicates are dropped
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        check_choice("part", self.part, PARTS)
        for task in self.tasks:
            check_choice("task", task, tuple(TASKS))
        known = (*SIDES, *SAMPLINGS) if self.part == "text" else ATTENTIONS
        usual = SIDES if self.part == "text" else ATTENTIONS
        object.__setattr__(self, "attentions", self.attentions or usual)
        for attention in self.attentions:
            check_choice("attention", attention, known)
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"rates must be above 0, got {self.rates}")
        check_count("repeats", self.repeats)
        if self.part == "text":
            self.texts("")  # validates the settings
        else:
            self.trainings({task: {"digest": ""} for task in self.tasks})

    def has(self, part: str) -> bool:
        """Whether a part is requested."""
        return self.part in (part, "all")

    def trainings(self, facts: Mapping[str, Mapping[str, Any]]) -> list[ArenaTraining]:
        """On the arena, seed by seed, so that an interrupted study has complete comparisons."""
        return [
            ArenaTraining(
                task=task,
                attention=attention,
                seed=seed,
                data=facts[task]["digest"],
                share=SHARES[task] if self.share is None else self.share,
                schedule=self.schedule,
                start=self.start,
                steps=self.steps,
                batch=self.batch,
                minutes=self.minutes,
            )
            for seed in self.seeds
            for task in self.tasks
            for attention in self.attentions
        ]

    def texts(self, digest: str) -> list[TextRun]:
        """Softmax, ours and the released layer on Text, in a smaller setting."""
        sizes = {"length": self.length or SHORT["length"], "steps": self.steps or SHORT["steps"]}
        sizes |= {} if self.batch is None else {"batch": self.batch}
        return [TextRun(attention=name, seed=self.seeds[0], data=digest, **sizes) for name in self.attentions]

    def series(self, facts: Mapping[str, Mapping[str, Any]]) -> list[SeriesTrial]:
        """Every attention under both protocols, seed by seed."""
        settings = [(attention, protocol) for attention in self.attentions for protocol in self.protocols]
        return [
            self._trial(facts, dataset, attention, protocol=protocol, seed=seed)
            for seed in self.seeds
            for dataset in self.datasets or facts
            for attention, protocol in settings
        ]

    def ablation(self, facts: Mapping[str, Mapping[str, Any]]) -> list[SeriesTrial]:
        """Primal attention with each of its components ablated, by seed; BasicMotions, too small, only if named."""
        return [
            self._trial(facts, dataset, "primal", variant=variant, seed=seed)
            for seed in self.seeds
            for dataset in self.datasets or (name for name in facts if name != "BasicMotions")
            for variant in VARIANTS
        ]

    def _trial(
        self, facts: Mapping[str, Mapping[str, Any]], dataset: str, attention: str, **settings: Any
    ) -> SeriesTrial:
        chosen = published_settings(dataset, attention, self.width)
        if "variant" in settings:
            chosen["eta"] = chosen["eta"] or ETA
        sizes: dict[str, Any] = {"width": self.width, "epochs": self.epochs}
        digest = facts[dataset]["digest"]
        return SeriesTrial(dataset=dataset, digest=digest, attention=attention, **sizes, **chosen, **settings)


def run(
    data: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    progress: Progress | None = None,
) -> PrimalStudy:
    """Train and time according to the plan, and compare primal attention with softmax.

    `data` is a folder with the sources of the parts: .ts files of time series, a .tsv file with columns split, label
    and text for Text, an .npz file of images for Image; ListOps and Pathfinder are generated. With `out`, sequences,
    checkpoints and every result are kept there: finished trainings are not repeated, and those stopped by
    `plan.minutes` are resumed. `workers` processes share the device; speed is measured by one, after the others.

    Parameters
    ----------
    data
        A folder with the sources. Default: generated tasks only.
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
    PrimalStudy
        A Reading.
    """
    plan = plan or Plan()
    check_count("workers", workers)
    chosen = pick_device(device)
    with study_folder(out) as folder:
        source = None if data is None else Path(data)
        sets: dict[str, dict[str, Any]] = {}
        if plan.has("series") or plan.has("ablation"):
            sets = {facts["dataset"]: facts for facts in prepare_series(source, folder, plan.datasets)}
        facts = _arena(plan, source, folder, progress) if plan.has("arena") else {}
        text = _text(plan, source, folder, chosen) if plan.part == "text" else []
        jobs: dict[str, Sequence[Job]] = {
            "series": plan.series(sets) if plan.has("series") else [],
            "ablation": plan.ablation(sets) if plan.has("ablation") else [],
            "arena": plan.trainings(facts) if facts else [],
        }
        results = run_parts(jobs, folder, chosen, workers, progress)
        where = device_name(chosen)
        timed = [Speed(task=t, where=where, repeats=plan.repeats, batch=plan.batch) for t in plan.tasks]
        speed = run_jobs(timed, folder, chosen, 1, progress) if plan.has("speed") else []
    return PrimalStudy(
        **results,
        speed=speed,
        text=text,
        provenance=provenance(plan=asdict(plan), arena=facts, device=where, workers=workers),
    )


def _text(plan: Plan, data: Path | None, folder: Path, device: str) -> list[dict[str, Any]]:
    facts = prepare_arena("text", folder, _source("text", data))
    end = float("inf") if plan.minutes is None else time() + 60 * plan.minutes
    return compared(plan.texts(facts["digest"]), plan.seeds, folder, device, lambda: time() > end, plan.rates)


def _arena(plan: Plan, data: Path | None, folder: Path, progress: Progress | None) -> dict[str, dict[str, Any]]:
    """Prepare the sequences of every requested task; all sources are located before any is prepared."""
    sources = {task: None if task in GENERATORS else _source(task, data) for task in plan.tasks}
    facts = {}
    for task, source in sources.items():
        examples = plan.examples if task in GENERATORS else None
        facts[task] = prepare_arena(task, folder, source, examples, os.cpu_count() or 1, progress)
    return facts


def _source(task: str, data: Path | None) -> Path | None:
    """The file of a task in a folder: the only .tsv, or .npz with images, compressed or not."""
    if data is None:
        return None
    if not data.is_dir():
        raise ValueError(f"data must be a folder, got {data}")
    ending, words = (".tsv", ("imdb", "text")) if task == "text" else (".npz", ("cifar", "image"))
    files = sorted(file for file in data.iterdir() if ending in file.suffixes)
    named = [file for file in files if any(word in file.name.lower() for word in words)]
    if len(candidates := named or files) > 1:
        raise ValueError(
            f"data must hold one {ending} file for task {task!r}, got {', '.join(f.name for f in candidates)}"
        )
    return candidates[0] if candidates else None
