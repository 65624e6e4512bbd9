"""Study `words`: how far does counting go, and is it a good start?

The claim: self-attention comes out of co-occurrence counts. Blanks in text never seen are filled by counting, and by a
Transformer that has learned to; and small Transformers start from counts, at random, and symmetric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from keyquery.capture.load import pick_device
from keyquery.instruments.cooccurrence.cooccurrence import Cooccurrence
from keyquery.instruments.look.corpus import NAMES, level
from keyquery.instruments.look.look import look
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.progress import Progress
from keyquery.support.statistics import paired
from keyquery_studies.common.jobs import check_folder, finish
from keyquery_studies.common.language_models import first_below, prepare
from keyquery_studies.common.rows import over_seeds
from keyquery_studies.depth.study import text_in
from keyquery_studies.words.masked_words import Ranking, encode, learned_from
from keyquery_studies.words.planted_models import STARTS, PlantedTraining

FIGURES = ("median", "reciprocal", "ten")
WHERE = 0.75  # of a training at random, whose loss there is the goal


@dataclass(frozen=True, kw_only=True)
class WordsStudy(Reading, kind="words study"):
    """Blanks filled by every way and seed, and every training with the curve of its loss."""

    ranks: Sequence[Mapping[str, Any]]  # one a way and seed
    trainings: Sequence[Mapping[str, Any]]
    heads: Sequence[Mapping[str, Any]]  # one a head of a trained model, beside the corpus
    symmetry: Mapping[str, float]  # of the counts, their logarithms and PPMI

    def records(self) -> list[dict[str, Any]]:
        """One row a way and seed, one a head, and one a training, without its curve."""
        trained = [{k: v for k, v in row.items() if k != "curve"} for row in self.trainings]
        return [dict(row) for row in (*self.ranks, *self.heads)] + trained

    def summary(self) -> list[dict[str, Any]]:
        """A row a way to fill blanks, the best last: median rank, mean of 1/rank and share among ten, with spreads."""
        return sorted(over_seeds(self.ranks, ["way"], FIGURES), key=lambda row: row["reciprocal"])

    def beside(self) -> list[dict[str, Any]]:
        """A row a model and layer: means over heads of how alike they are, what is chance, and how many are beyond it.

        `points_size` is the mean of |points|: heads that point forth and back would cancel.
        """
        groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for row in self.heads:
            groups.setdefault((row["model"], row["layer"]), []).append(row)
        found = []
        for (model, layer), alike in groups.items():
            one: dict[str, Any] = {"model": model, "layer": layer, "heads": len(alike)}
            for name in NAMES:
                one[name] = mean(row[name] for row in alike)
                one[f"{name}_level"] = mean(level(row, name) for row in alike)
                one[f"{name}_beyond"] = sum(abs(row[name]) > level(row, name) for row in alike)
            one["points_size"] = mean(abs(row["points"]) for row in alike)
            found.append(one)
        return found

    def goals(self) -> dict[str, float]:
        """For each objective the loss that every start at random has reached after three quarters of its steps."""
        found: dict[str, float] = {}
        for row in self.trainings:
            if row["start"] == "random":
                upto = [loss for step, loss in row["curve"] if step <= WHERE * row["steps"]]
                found[row["objective"]] = max(found.get(row["objective"], 0.0), min(upto))
        return found

    def starts(self) -> list[dict[str, Any]]:
        """A row an objective and start: steps to the goal and loss in the end, mean and spread over seeds.

        `saved` is how many steps fewer than at random, seed by seed, with a 95 % interval; None where some never come.
        """
        goals, found = self.goals(), list[dict[str, Any]]()
        rows = [{**row, "reached": first_below(row["curve"], goals[row["objective"]])} for row in self.trainings]
        for one in over_seeds(rows, ["objective", "start"], ["reached", "loss"]):
            alike = {row["seed"]: row["reached"] for row in rows if _place(row) == _place(one)}
            base = {row["seed"]: row["reached"] for row in rows if _place(row) == (one["objective"], "random")}
            pairs = [(base[seed], alike[seed]) for seed in alike if seed in base]
            there = len(pairs) > 1 and all(None not in pair for pair in pairs)
            random, own = zip(*pairs, strict=True) if there else ((), ())
            saved = paired(torch.tensor(own), torch.tensor(random)) if there else None
            found.append({**one, "saved": saved})
        return found


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["objective"], row["start"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run: blanks of some seeds, and trainings of others, with one or both objectives."""

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
        """Every start, a seed after the other."""
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
    """Fill blanks by counting and by a model that learned to find masked tokens, and train from every start.

    The heads of that model, and of others `beside` it that have the same tokens, are set beside the corpus.

    `data` is a text file, packed or not, or a folder with one. With `out`, tokens and every result are kept there: what
    is done is not done again; without data the tokens that lie there are used.
    """
    plan = plan or Plan()
    if data is None and out is None:
        raise ValueError("data must be a text file, or a folder with one")
    chosen, corpus = pick_device(device), None if data is None else text_in(Path(data))
    with nullcontext(str(out)) if out is not None else TemporaryDirectory() as place:
        folder = Path(place)
        check_folder(folder)
        blanks = encode(corpus, folder, model, force)
        same = {"text": blanks["digest"], "model": str(model), "size": blanks["size"], "mask": blanks["mask"]}
        jobs = [Ranking(seed=seed, window=plan.window, **same) for seed in plan.blanks]
        rankings = finish(jobs, folder, chosen, workers, progress)
        counts = learned_from(folder, blanks["size"], plan.window)
        heads = [row for one in dict.fromkeys(map(str, (model, *beside))) for row in _heads(one, counts)]
        facts = prepare(corpus, folder, plan.vocabulary, force)
        trainings = finish(plan.trainings(facts["digest"]), folder, chosen, workers, progress)
    ranks = [{"way": way, "seed": row["seed"], **found} for row in rankings for way, found in row["ways"].items()]
    about = provenance(corpus=facts, blanks=blanks, plan=asdict(plan), device=chosen, pairs=rankings[0]["pairs"])
    found = {"ranks": ranks, "trainings": trainings, "heads": heads, "symmetry": rankings[0]["symmetry"]}
    return WordsStudy(**found, provenance=about)


def _heads(model: str, counts: Cooccurrence) -> list[dict[str, Any]]:
    """Each head of a model beside the corpus."""
    reading = look(model, corpus=counts)
    place = {"model": reading.model["name"]}
    return [
        {**place, "layer": head["layer"], "head": head["head"], **head["corpus"]}
        for head in reading.heads
        if "corpus" in head
    ]
