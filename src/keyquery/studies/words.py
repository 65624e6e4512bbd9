"""Study `words`: how far does counting go, and is it a good start?

The claim: self-attention comes out of co-occurrence counts. Blanks in text never seen are filled by counting, by layers
of counts that learn, and by Transformers; and small Transformers start from counts, at random, and symmetric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from keyquery.capture.load import pick_device
from keyquery.forms.checks import check_count
from keyquery.forms.counts import KINDS
from keyquery.instruments.intervals import paired
from keyquery.progress import Progress
from keyquery.reading import Reading, provenance
from keyquery.studies.blanked import HEADS, RANK, REACH, Blanks, counting, learned, told_ranks
from keyquery.studies.depth import text_in
from keyquery.studies.jobs import Job, check_folder, finish, name_of
from keyquery.studies.language import first_below, prepare
from keyquery.studies.planted import STARTS, PlantedTraining, counted
from keyquery.studies.rows import over_seeds
from keyquery.studies.texts import HELD_OUT, OBJECTIVES

FIGURES = ("median", "reciprocal", "ten")
WHERE = 0.75  # of a training at random, whose loss there is the goal


@dataclass(frozen=True, kw_only=True)
class WordsStudy(Reading, kind="words study"):
    """Blanks filled by every way and seed, and every training with the curve of its loss."""

    ranks: Sequence[Mapping[str, Any]]  # one a way and seed
    trainings: Sequence[Mapping[str, Any]]
    symmetry: Mapping[str, float]  # of the counts, their logarithms and PPMI

    def records(self) -> list[dict[str, Any]]:
        """One row a way and seed, then one a training, without its curve."""
        trained = [{k: v for k, v in row.items() if k not in ("curve", "ranks")} for row in self.trainings]
        return [dict(row) for row in self.ranks] + trained

    def summary(self) -> list[dict[str, Any]]:
        """A row a way to fill blanks, the best last: median rank, mean of 1/rank and share among ten, with spreads."""
        return sorted(over_seeds(self.ranks, ["way"], FIGURES), key=lambda row: row["reciprocal"])

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
class Ranking:
    """Blanks of one seed, filled by counting, and by layers of counts that learned for `steps`."""

    seed: int
    steps: int
    text: str
    vocabulary: int
    window: int = 5

    @property
    def name(self) -> str:
        """The name of its file."""
        return name_of(("ranks", self.seed), {**asdict(self), "reach": REACH, "heads": HEADS, "rank": RANK})

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Ranks by every way; without steps no layer learns."""
        counts, blanks = counted(folder, self.window), Blanks.of(folder, self.seed)
        found = {way: told_ranks(scores, blanks.truth) for way, scores in counting(counts, blanks).items()}
        if self.steps:
            ids = torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int64))
            ids = ids[: int(len(ids) * (1 - HELD_OUT))]
            for way, fresh in (("layer from counts", False), ("layer at random", True)):
                model = learned(counts, ids, fresh, self.steps, self.seed).eval()
                with torch.no_grad():
                    found[way] = told_ranks(model(blanks.context), blanks.truth)
        symmetry = {kind: counts.symmetry(kind) for kind in KINDS}
        return {**asdict(self), "ways": found, "symmetry": symmetry, "counted": counts.total}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run: rankings of `blanks` seeds, trainings of `seeds`, and one longer masked training of each seed."""

    seeds: tuple[int, ...] = (0, 1, 2)
    blanks: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 200
    long: int = 800
    learned: int = 60
    vocabulary: int = 2048
    window: int = 5

    def __post_init__(self) -> None:
        for name in ("seeds", "blanks"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")
        for name in ("steps", "long", "window"):
            check_count(name, getattr(self, name))
        check_count("learned", self.learned, least=0)

    def rankings(self, text: str) -> list[Job]:
        """One a seed of blanks; layers learn for the seeds of trainings."""
        same: dict[str, Any] = {"text": text, "vocabulary": self.vocabulary, "window": self.window}
        return [Ranking(seed=seed, steps=self.learned if seed in self.seeds else 0, **same) for seed in self.blanks]

    def trainings(self, text: str) -> list[Job]:
        """Every start of both objectives, a seed after the other."""
        same: dict[str, Any] = {"text": text, "vocabulary": self.vocabulary, "window": self.window}
        return [
            PlantedTraining(objective=objective, start=start, seed=seed, steps=self.steps, **same)
            for seed in self.seeds
            for objective in OBJECTIVES
            for start in STARTS
        ]

    def longer(self, text: str) -> list[Job]:
        """A masked model at random that learns for longer, to be held against counting."""
        same: dict[str, Any] = {"text": text, "vocabulary": self.vocabulary, "window": self.window}
        made = (
            PlantedTraining(objective="masked", start="random", seed=s, steps=self.long, **same) for s in self.seeds
        )
        return list(made)


def count_words(
    data: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> WordsStudy:
    """Fill blanks by counting and by what learns, and train from every start.

    `data` is a text file, packed or not, or a folder with one. With `out`, tokens and every result are kept there: what
    is done is not done again; without data the tokens that lie there are used.
    """
    plan = plan or Plan()
    if data is None and out is None:
        raise ValueError("data must be a text file, or a folder with one")
    chosen = pick_device(device)
    with nullcontext(str(out)) if out is not None else TemporaryDirectory() as place:
        folder = Path(place)
        check_folder(folder)
        facts = prepare(None if data is None else text_in(Path(data)), folder, plan.vocabulary, force)
        text = facts["digest"]
        rankings = finish(plan.rankings(text), folder, chosen, workers, progress)
        trainings = finish(plan.trainings(text), folder, chosen, workers, progress)
        longer = finish(plan.longer(text), folder, chosen, workers, progress)
    ranks = [{"way": way, "seed": row["seed"], **found} for row in rankings for way, found in row["ways"].items()]
    for way, rows in (("Transformer", trainings), ("Transformer, longer", longer)):
        chosen_rows = [row for row in rows if _place(row) == ("masked", "random")]
        ranks += [{"way": way, "seed": row["seed"], **row["ranks"]} for row in chosen_rows]
    about = provenance(corpus=facts, plan=asdict(plan), device=chosen, pairs=rankings[0]["counted"])
    return WordsStudy(ranks=ranks, trainings=trainings, symmetry=rankings[0]["symmetry"], provenance=about)
