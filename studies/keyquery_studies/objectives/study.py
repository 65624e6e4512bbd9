"""Study `objectives`: one architecture, one text, two objectives. What do the heads become, and when?

The masked model must find what goes together from both sides, the next-token model what follows what. The two small
models that ship with the package are the first seed of this study.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.layers import LanguageModel, Shape
from keyquery.learn.data import encode_corpus, read_corpus, train_tokenizer, unwrap
from keyquery.learn.training import Recipe, train
from keyquery.reading import Reading, provenance
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.objectives import BATCH, HELD_OUT, LOOKED_AT, OBJECTIVES, SHARES, Task
from keyquery_studies.common.rows import FORMER
from keyquery_studies.common.runner import resumed
from keyquery_studies.common.store import Store, digest_of
from keyquery_studies.objectives.model_card import write_model

NAMES = {"masked": "encoder", "next token": "decoder"}


@dataclass(frozen=True, kw_only=True)
class Objectives(Reading, kind="objectives"):
    """Heads over training, for both objectives and every seed, and how well the models learned."""

    former = FORMER

    heads: Sequence[Mapping[str, Any]]  # one per head and recorded step
    losses: Sequence[Mapping[str, Any]]  # one per objective and seed
    shape: Mapping[str, Any]  # hyperparameters of the models
    recipe: Mapping[str, Any]  # and of the training

    def records(self) -> list[dict[str, Any]]:
        """One row per head and recorded step."""
        return [dict(row) for row in self.heads]

    def shares(self) -> tuple[str, ...]:
        """The parts of the scores whose shares were measured; a study of a former version has fewer."""
        return tuple(name for name in SHARES if all(name in row for row in self.heads[:1]))

    def summary(self) -> list[dict[str, Any]]:
        """Symmetry and shares on data of each layer at the end: mean over heads, then mean and sd over seeds."""
        last = max(row["step"] for row in self.heads)
        rows = []
        for objective in OBJECTIVES:
            for layer in sorted({row["layer"] for row in self.heads}):
                at = [r for r in self.heads if (r["objective"], r["layer"], r["step"]) == (objective, layer, last)]
                seeds = sorted({row["seed"] for row in at})
                row: dict[str, Any] = {"objective": objective, "layer": layer, "seeds": len(seeds)}
                for name in ("symmetry", *self.shares()):
                    each = [mean(r[name] for r in at if r["seed"] == seed) for seed in seeds]
                    row |= {name: mean(each), f"{name}_sd": stdev(each) if len(each) > 1 else math.nan}
                rows.append({key: None if value != value else value for key, value in row.items()})
        return rows

    @classmethod
    def joined(cls, *parts: Objectives) -> Objectives:
        """One reading of separate runs, such as seeds on several machines."""
        first = parts[0]
        if any(part.shape != first.shape for part in parts):
            raise ValueError("only runs of one shape can be joined")
        seeds = [seed for part in parts for seed in part.provenance.get("seeds", [])]
        return cls(
            heads=[row for part in parts for row in part.heads],
            losses=[row for part in parts for row in part.losses],
            shape=first.shape,
            recipe=first.recipe,
            provenance={**first.provenance, "seeds": seeds},
        )

    def onsets(self) -> list[dict[str, Any]]:
        """For every head, which part is the largest in the end, and from which recorded step on it stayed so."""
        parts = [name for name in self.shares() if name != "interaction"]
        heads: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for row in self.heads:
            heads.setdefault((row["objective"], row["seed"], row["layer"], row["head"]), []).append(row)
        onsets = []
        for (objective, seed, layer, head), rows in heads.items():
            rows.sort(key=lambda row: row["step"])
            leading = [max(parts, key=row.__getitem__) for row in rows]
            kept = next(i for i in range(len(rows)) if set(leading[i:]) == {leading[-1]})
            place = {"objective": objective, "seed": seed, "layer": layer, "head": head}
            onsets.append({**place, "part": leading[-1], "since": rows[kept]["step"]})
        return onsets


def run(
    corpus: str | Path,
    out: str | Path | None = None,
    seeds: Sequence[int] = (0,),
    steps: int = 6000,
    shape: Shape | None = None,
    device: str = "auto",
    about: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> Objectives:
    """Train an encoder (masked) and a decoder (next token), alike but for the objective, and look at every head.

    `corpus` is a text file, packed by xz or not. With `out`, the models of the first seed, their tokenizer, cards and
    logs are written there, and an interrupted study is resumed; models of another study in that folder are
    kept unless `force`. `about` describes the text in the model cards.

    Parameters
    ----------
    corpus
        A text file, compressed or not.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    seeds
        One training each.
    steps
        Of training. Default: 6000.
    shape
        Hyperparameters of the models. Default: those of the study.
    device
        Where to train. Default: "auto", a GPU if there is one.
    about
        Describes the text in the model cards.
    force
        Replace models of another study in `out`. Default: no.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Objectives
        A Reading.
    """
    shape = shape or Shape(vocab_size=4096)
    chosen = pick_device(device)
    seeds = list(dict.fromkeys(seeds))
    text = unwrap(read_corpus(corpus))
    place = None if out is None else Place(Path(out), text, shape, steps, force)
    tokenizer = _tokenizer(text, shape.vocab_size, place)
    ids = encode_corpus(text, tokenizer).to(chosen)
    kept = int(len(ids) * (1 - HELD_OUT))  # the rest is held out
    tasks = {name: Task(name, ids[:kept], ids[kept:], shape.length, tokenizer) for name in OBJECTIVES}
    recipes = [Recipe(steps, lr=2e-3, warmup=min(300, steps // 4), seed=seed, weight_decay=0.1) for seed in seeds]
    runs = [Run(task, shape, recipe, place) for recipe in recipes for task in tasks.values()]

    def trained(run: Run) -> dict[str, Any]:
        model = run.train(chosen, progress)
        if place is not None and run.recipe.seed == seeds[0]:
            card = {"corpus": Path(corpus).name, "about": about, "batch": BATCH, **run.result}
            write_model(place.folder / NAMES[run.task.objective], model, tokenizer, card)
        return {"heads": run.rows, "result": run.result}

    results = list(resumed(runs, lambda run: f"{run.name}.done.json", trained, None if place is None else place.store))
    columns = ("objective", "seed", "loss", "tokens")
    return Objectives(
        heads=[row for result in results for row in result["heads"]],
        losses=[{name: result["result"][name] for name in columns} for result in results],
        shape=shape.to_dict(),
        recipe=asdict(recipes[-1]),
        provenance=provenance(corpus=Path(corpus).name, digest=digest_of(text), device=chosen, seeds=seeds),
    )


class Place:
    """Where a study writes: models in the folder itself, and what a resumed run needs in a subfolder of its own.

    The subfolder is named by a digest of text, shape, steps and measurements, so that other settings never mix.
    """

    def __init__(self, folder: Path, text: str, shape: Shape, steps: int, force: bool) -> None:
        settings = json.dumps([digest_of(text, length=64), shape.to_dict(), steps, SHARES, LOOKED_AT])
        self.folder = folder
        self.work = folder / "work" / digest_of(settings, length=12)
        existing = [name for name in NAMES.values() if (folder / name).exists()]
        if existing and not self.work.exists() and not force:
            raise FileExistsError(f"{folder / existing[0]} belongs to another study; --force replaces it")
        self.work.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.work, dict | list)


def recorded(steps: int) -> set[int]:
    """At which steps heads are looked at: the start, then every half power of two, and the end."""
    return {0, steps, *(int(2 ** (i / 2)) for i in range(8, 2 * steps.bit_length()) if 2 ** (i / 2) < steps)}


class Run:
    """One model of the study: its training, and the rows of its heads."""

    def __init__(self, task: Task, shape: Shape, recipe: Recipe, place: Place | None) -> None:
        self.task, self.recipe, self.place = task, recipe, place
        self.shape = Shape(**{**shape.to_dict(), "causal": task.objective == "next token"})
        self.name = f"{NAMES[task.objective]}-{recipe.seed}"
        self.rows: list[dict[str, Any]] = []  # of the heads
        self.result: dict[str, Any] = {}

    def train(self, device: str, progress: Progress | None) -> LanguageModel:
        """The trained model; heads are analysed during training, and an interrupted training is resumed."""
        checkpoint, heads = None, f"{self.name}.heads.json"
        if self.place is not None:
            checkpoint, self.rows = self.place.work / f"{self.name}.checkpoint", self.place.store.get(heads, [])
        torch.manual_seed(self.recipe.seed)
        model, wanted = LanguageModel(self.shape).to(device), recorded(self.recipe.steps)

        def after(step: int, model: nn.Module) -> None:
            if step in wanted and all(row["step"] != step for row in self.rows):
                place = {"objective": self.task.objective, "seed": self.recipe.seed, "step": step}
                self.rows.extend({**place, **row} for row in self.task.look(model))
                if self.place is not None:
                    self.place.store.write(heads, self.rows, allow_nan=True)

        task = self.task
        log = train(model, task.draw, task.loss, self.recipe, after=after, checkpoint=checkpoint, progress=progress)
        self.result = {"objective": task.objective, "seed": self.recipe.seed, "loss": task.validate(model)}
        self.result |= {"tokens": len(task.ids), "recipe": asdict(self.recipe), "log": log.rows}
        return model


def _tokenizer(text: str, size: int, place: Place | None) -> Tokenizer:
    """A new tokenizer, or the one that an earlier run of this study made."""
    if place is not None and (place.work / "tokenizer.json").exists():
        return Tokenizer.load(place.work)
    tokenizer = train_tokenizer(text, size)
    if place is not None:
        tokenizer.save(place.work)
    return tokenizer
