"""Study `words`: how far does counting go, and is it a good initialisation?

The claim: self-attention follows from co-occurrence counts. Masked tokens of held-out text are predicted by counts and
by a Transformer; and small Transformers are initialised from counts, at random, and symmetrically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from keyquery.instruments.look.corpus import NAMES, level
from keyquery.instruments.look.look import look
from keyquery.instruments.look.reading import FORMER
from keyquery.learn.cooccurrence.cooccurrence import Cooccurrence
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery.support.statistics import paired
from keyquery_studies.common.language_models import first_below, prepare, text_in
from keyquery_studies.common.rows import over_seeds
from keyquery_studies.common.runner import run_jobs, study_folder
from keyquery_studies.words.masked_words import Ranking, encode, learned_from
from keyquery_studies.words.planted_models import STARTS, PlantedTraining

FIGURES = ("median", "reciprocal", "ten")
WHERE = 0.75  # of a training with random initialisation, whose loss there is the goal


@dataclass(frozen=True, kw_only=True)
class WordsStudy(Reading, kind="words study"):
    """Masked-token ranks by method and seed, and every training with its loss curve."""

    former = FORMER

    ranks: Sequence[Mapping[str, Any]]  # one per method and seed
    trainings: Sequence[Mapping[str, Any]]  # one per training, with its loss curve
    heads: Sequence[Mapping[str, Any]]  # one per head of a trained model, compared with the corpus
    symmetry: Mapping[str, float]  # of the counts, their logarithms and PPMI

    def records(self) -> list[dict[str, Any]]:
        """One row per method and seed, per head, and per training, without its curve."""
        trained = [{k: v for k, v in row.items() if k != "curve"} for row in self.trainings]
        return [dict(row) for row in (*self.ranks, *self.heads)] + trained

    def summary(self) -> list[dict[str, Any]]:
        """One row per method, best last: median rank, mean reciprocal rank and top-10 accuracy, each with its sd."""
        return sorted(over_seeds(self.ranks, ["way"], FIGURES), key=lambda row: row["reciprocal"])

    def beside(self) -> list[dict[str, Any]]:
        """One row per model and layer: mean cosines over heads, their null levels, and how many heads exceed them.

        `skew_cosine_size` is the mean of absolute values, in which heads of opposite direction do not cancel.
        """
        groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for row in self.heads:
            groups.setdefault((row["model"], row["layer"]), []).append(row)
        rows = []
        for (model, layer), alike in groups.items():
            means: dict[str, Any] = {"model": model, "layer": layer, "heads": len(alike)}
            for name in NAMES:
                means[name] = mean(row[name] for row in alike)
                means[f"{name}_level"] = mean(level(row, name) for row in alike)
                means[f"{name}_beyond"] = sum(abs(row[name]) > level(row, name) for row in alike)
            means["skew_cosine_size"] = mean(abs(row["skew_cosine"]) for row in alike)
            rows.append(means)
        return rows

    def goals(self) -> dict[str, float]:
        """Per objective, the loss that every random initialisation has reached after three quarters of its steps."""
        goals: dict[str, float] = {}
        for row in self.trainings:
            if row["start"] == "random":
                upto = [loss for step, loss in row["curve"] if step <= WHERE * row["steps"]]
                goals[row["objective"]] = max(goals.get(row["objective"], 0.0), min(upto))
        return goals

    def starts(self) -> list[dict[str, Any]]:
        """One row per objective and initialisation: steps to the goal and final loss, mean and sd over seeds.

        `saved` is how many steps fewer than at random, seed by seed, with a 95 % interval; None where some never come.
        """
        goals, starts = self.goals(), list[dict[str, Any]]()
        rows = [{**row, "reached": first_below(row["curve"], goals[row["objective"]])} for row in self.trainings]
        for means in over_seeds(rows, ["objective", "start"], ["reached", "loss"]):
            alike = {row["seed"]: row["reached"] for row in rows if _place(row) == _place(means)}
            base = {row["seed"]: row["reached"] for row in rows if _place(row) == (means["objective"], "random")}
            pairs = [(base[seed], alike[seed]) for seed in alike if seed in base]
            there = len(pairs) > 1 and all(None not in pair for pair in pairs)
            random, own = zip(*pairs, strict=True) if there else ((), ())
            saved = paired(torch.tensor(own), torch.tensor(random)) if there else None
            starts.append({**means, "saved": saved})
        return starts


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["objective"], row["start"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The seeds of masked tokens and of trainings, with one or both objectives."""

    seeds: tuple[int, ...] = (0, 1, 2)
    blanks: tuple[int, ...] = (0, 1, 2, 3, 4)
    objectives: tuple[str, ...] = ("next token",)
    steps: int = 300
    vocabulary: int = 2048
    window: int = 5

    def __post_init__(self) -> None:
        for name in ("seeds", "blanks", "objectives"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")
        for name in ("steps", "window"):
            check_count(name, getattr(self, name))
        self.trainings("")  # refuses what no training takes

    def trainings(self, text: str) -> list[PlantedTraining]:
        """Every initialisation, seed by seed."""
        same: dict[str, Any] = {"text": text, "vocabulary": self.vocabulary, "window": self.window}
        return [
            PlantedTraining(objective=objective, start=start, seed=seed, steps=self.steps, **same)
            for seed in self.seeds
            for objective in self.objectives
            for start in STARTS
        ]


def run(
    data: str | Path | None,
    out: str | Path | None,
    model: str | Path,
    beside: Sequence[str | Path] = (),
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> WordsStudy:
    """Predict masked tokens by counts and by a masked language model, and train from every initialisation.

    The heads of that model, and of others (`beside`) with the same tokens, are compared with the corpus.

    `data` is a text file, compressed or not, or a folder with one. With `out`, tokens and every result are kept there,
    and nothing is computed twice; without data the tokens in `out` are used.

    Parameters
    ----------
    data
        A text file or a folder with one; None: the tokens in `out`.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    model
        A masked language model.
    beside
        Further models with the same tokens. Default: none.
    plan
        What to train. Default: the whole study.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    force
        Replace tokens of another corpus in `out`. Default: no.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    WordsStudy
        A Reading.
    """
    plan = plan or Plan()
    if data is None and out is None:
        raise ValueError("data must be a text file, or a folder with one")
    chosen, corpus = pick_device(device), None if data is None else text_in(Path(data))
    with study_folder(out) as folder:
        blanks = encode(corpus, folder, model, force)
        same = {"text": blanks["digest"], "model": str(model), "size": blanks["size"], "mask": blanks["mask"]}
        jobs = [Ranking(seed=seed, window=plan.window, **same) for seed in plan.blanks]
        rankings = run_jobs(jobs, folder, chosen, workers, progress)
        counts = learned_from(folder, blanks["size"], plan.window)
        heads = [row for path in dict.fromkeys(map(str, (model, *beside))) for row in _heads(path, counts)]
        facts = prepare(corpus, folder, plan.vocabulary, force)
        trainings = run_jobs(plan.trainings(facts["digest"]), folder, chosen, workers, progress)
    ranks = [{"way": way, "seed": row["seed"], **results} for row in rankings for way, results in row["ways"].items()]
    about = provenance(corpus=facts, blanks=blanks, plan=asdict(plan), device=chosen, pairs=rankings[0]["pairs"])
    results = {"ranks": ranks, "trainings": trainings, "heads": heads, "symmetry": rankings[0]["symmetry"]}
    return WordsStudy(**results, provenance=about)


def _heads(model: str, counts: Cooccurrence) -> list[dict[str, Any]]:
    """Each head of a model, compared with the corpus."""
    reading = look(model, corpus=counts)
    place = {"model": reading.model["name"]}
    return [
        {**place, "layer": head["layer"], "head": head["head"], **head["corpus"]}
        for head in reading.heads
        if "corpus" in head
    ]
