"""Study `circuit`: which parts of which heads copying needs, in checkpoints and in models trained through the change.

Roles and symmetry of all heads stand beside the costs of their parts. Each cost has two controls: the part taken from
another sequence, and a random change of equal norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keyquery.learn.data import read_corpus
from keyquery.reading import Reading, provenance, short
from keyquery.support.extras import optional
from keyquery.support.statistics import paired
from keyquery_studies.circuit.measures import ROLES, deadline
from keyquery_studies.circuit.runs import checkpoint, trained
from keyquery_studies.circuit.statistics import area, bootstrapped, rank_correlation
from keyquery_studies.circuit.training import Plan, Size
from keyquery_studies.common.comparisons import holm
from keyquery_studies.common.runner import study_folder
from keyquery_studies.common.store import Store
from keyquery_studies.common.subjects import Subject

FLOOR = 0.05  # accuracy at or below which a model copies nothing (chance is .03 for those trained here): no comparison
Side = tuple[str, str]  # a part, and how it is changed
# Stated before the runs: in the highest head of each role, the first side costs more than the second; symmetric and
# skew parts of an induction head are expected to cost alike.
CONTRASTS: tuple[tuple[str, Side, Side], ...] = (
    *(("previous_token", ("position", "mean"), (part, "mean")) for part in ("symmetric", "skew", "popularity")),
    ("previous_token", ("position", "mean"), ("position", "random")),
    ("induction", ("symmetric", "mean"), ("skew", "mean")),
    ("induction", ("symmetric", "mean"), ("position", "mean")),
    *(("induction", (part, kind), (part, "random")) for part in ("symmetric", "skew") for kind in ("mean", "resample")),
    ("duplicate_token", ("symmetric", "mean"), ("skew", "mean")),
    *(("duplicate_token", ("symmetric", kind), ("symmetric", "random")) for kind in ("mean", "resample")),
)


@dataclass(frozen=True, kw_only=True)
class Circuit(Reading, kind="circuit"):
    """Roles, symmetry and costs of the parts of heads; trained models are called by their `seed` and `step`."""

    models: Sequence[Mapping[str, Any]]  # one per checkpoint, and one per seed and step with its losses
    heads: Sequence[Mapping[str, Any]]  # one per head, with its symmetry, and score, interval and null level by role
    costs: Sequence[Mapping[str, Any]]  # one per change of a part of a head, or of all heads (layer None) by a gain

    def records(self) -> list[dict[str, Any]]:
        """One row per change, without the values of single sequences."""
        return [{key: value for key, value in row.items() if key != "values"} for row in self.costs]

    def highest(self, model: str, role: str, seed: int | None = None) -> tuple[int, int]:
        """The head of highest score in a role, of those whose parts were changed; of a trained model at the end."""
        changed = {_key(row) for row in self.costs}
        rows = [row for row in self._last(self.heads) if (row["model"], row["seed"]) == (model, seed)]
        best = max((row for row in rows if _key(row) in changed), key=lambda row: row[role])
        return best["layer"], best["head"]

    def weights_alone(self) -> list[dict[str, Any]]:
        """How well raw symmetry tells heads of a role, by model: area under the ROC curve, and rank correlation.

        A head has the role if `kq.roles` names it. Intervals are bootstraps over heads.
        """
        rows = []
        for model in dict.fromkeys(row["model"] for row in self.heads):
            own = [row for row in self._last(self.heads) if row["model"] == model]
            raw = torch.tensor([row["raw"] for row in own])
            for role in ROLES:
                has = torch.tensor([role in row["roles"] for row in own])
                score = torch.tensor([row[role] for row in own])
                found = bootstrapped(area, raw, has) if 0 < int(has.sum()) < len(has) else None
                place = {"model": model, "role": role, "heads": len(own), "named": int(has.sum())}
                along = bootstrapped(rank_correlation, raw, score)
                rows.append({**place, "area": found and found._asdict(), "correlation": along._asdict()})
        return rows

    def summary(self) -> list[dict[str, Any]]:
        """The contrasts of every model: paired differences over sequences, or over seeds of trained models.

        `p` is adjusted by Holm for all rows that have one; a row at the floor has none.
        """
        rows = []
        for model in dict.fromkeys(row["model"] for row in self.costs):
            for role, first, second in CONTRASTS:
                place = {"model": model, "role": role, "first": " ".join(first), "second": " ".join(second)}
                rows.append({**place, **self._contrast(model, role, first, second)})
        tested = [row for row in rows if row.get("p") is not None]
        for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p"] = p
        return rows

    def _contrast(self, model: str, role: str, first: Side, second: Side) -> dict[str, Any]:
        seeds = dict.fromkeys(row["seed"] for row in self.costs if row["model"] == model)
        sides, heads, floors = [], [], []
        for seed in seeds:
            head = self.highest(model, role, seed)
            pair = [self.cost(model, head, *side, seed=seed) for side in (first, second)]
            if any(row is None for row in pair):
                return {"head": f"{head[0]}.{head[1]}", "change": None, "low": None, "high": None, "p": None}
            floors.append(
                any(row["accuracy_before"] <= FLOOR for row in pair) or all(r["accuracy"] <= FLOOR for r in pair)
            )
            sides.append([row["values"] if seed is None else [row["change"]] for row in pair])
            heads.append(f"{head[0]}.{head[1]}")
        one, other = (torch.tensor([v for seed in sides for v in seed[index]], dtype=torch.float64) for index in (0, 1))
        facts: dict[str, Any] = {"head": ", ".join(heads), "of": float(one.mean()), "less": float(other.mean())}
        facts |= {"n": len(one), "floor": any(floors)}
        p = None if any(floors) else float(optional("scipy.stats", "a t-test").ttest_rel(one, other).pvalue)
        return {**facts, **paired(other, one)._asdict(), "p": p}

    def cost(
        self,
        model: str,
        head: tuple[int, int],
        part: str,
        kind: str = "mean",
        means: str = "position",
        seed: int | None = None,
    ) -> Any:
        """The row of one change, of a trained model at its last step; None if it was not measured."""
        wanted = (model, seed, *head, part, kind, means)
        names = ("model", "seed", "layer", "head", "part", "kind", "means")
        return next((row for row in self._last(self.costs) if tuple(row[name] for name in names) == wanted), None)

    def followed(self) -> list[dict[str, Any]]:
        """Through training: loss and copying of each seed, and of its final highest heads role, symmetry and costs."""
        rows = []
        for model in (row for row in self.models if row["seed"] is not None):
            for role in ROLES[:2]:
                head = self.highest(model["name"], role, model["seed"])
                place = {"seed": model["seed"], "step": model["step"], "role": role, "head": f"{head[0]}.{head[1]}"}
                key = (model["name"], model["seed"], model["step"], *head)
                own = next(row for row in self.heads if _key(row) == key)
                parts = {row["part"]: row["change"] for row in self.costs if _key(row) == key and row["kind"] == "mean"}
                rows.append({**place, "copying": model["copying"], "score": own[role], "raw": own["raw"], **parts})
        return rows

    def _last(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        last = max((row["step"] for row in self.models if row["step"] is not None), default=None)
        return [row for row in rows if row["step"] in (None, last)]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "seed", "step", "layer", "head"))


def run(
    models: Sequence[str | Path] = (),
    text: str | Path | None = None,
    out: str | Path | None = None,
    *,
    heads: Sequence[tuple[str, int, int]] = (),
    by_both: Sequence[tuple[str, int, int]] = (),
    bos: bool = False,
    training: bool = True,
    sequences: int = 24,
    plan: Plan | None = None,
    seconds: float = float("inf"),
) -> Circuit:
    """Measure checkpoints, on random tokens of a text's vocabulary, and with `training` train and follow small models.

    Besides the highest of each role, `heads` are measured, each with the beginning of its model's name. With `out`
    every result is kept as soon as it is there, and an interrupted study is resumed. After `seconds` no further result
    is computed.
    """
    late, size, plan = deadline(seconds), Size(), plan or Plan()
    if models and text is None:
        raise ValueError("text must be given for checkpoints: random tokens are drawn from its vocabulary")
    with study_folder(out) as folder:
        facts = []
        for source in models:
            subject = Subject.load(source, "cpu")
            facts.append({**subject.facts, "seed": None, "step": None})
            name = subject.facts["name"].lower()
            also, both = ([tuple(p) for own, *p in group if name.startswith(own)] for group in (heads, by_both))
            options: dict[str, Any] = {"sequences": sequences, "also": also, "by_both": both, "bos": bos}
            checkpoint(subject, {"text": read_corpus(text or "")}, Store(folder, list), late, **options)
        if training:
            trained(Store(folder), size, plan, late)
        return collected(folder, facts, {"sequences": sequences, "bos": bos, "heads": list(heads), "plan": repr(plan)})


def collected(folder: Path, facts: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Circuit:
    """A reading of the results in a folder."""
    models, heads, costs = list(facts), [], []
    for path in sorted(folder.glob("seed*.json")):
        row = Store(folder).read(path.name)
        place = {"model": "attention-only", "seed": row["seed"], "step": row["step"]}
        losses = {key: row[key] for key in ("training", "repeated", "copying")}
        models.append({"name": place["model"], "seed": row["seed"], "step": row["step"], **losses})
        heads += [{**place, **_flat(head)} for head in row["heads"]]
        own = [{**place, **_place(cost)} for cost in (*row["costs"], *row["everywhere"])]
        costs += [{key: value for key, value in cost.items() if key != "values"} for cost in own]
    for fact in facts:
        place = {"model": fact["name"], "seed": None, "step": None}
        heads += [{**place, **_flat(head)} for head in Store(folder, list).get(f"{fact['name']}-heads.json", [])]
        for path in sorted(folder.glob(f"{fact['name']}-[ce]*.json")):
            costs += [{**place, **_place(cost)} for cost in Store(folder, list).read(path.name)]
    return Circuit(models=models, heads=short(heads, 5), costs=short(costs, 5), provenance=provenance(**settings))


def _flat(head: Mapping[str, Any]) -> dict[str, Any]:
    scores = {
        name + ("" if key == "score" else f"_{key}"): values[key]
        for name, values in head["scores"].items()
        for key in ("score", "low", "high", "null")
    }
    return {**{key: head[key] for key in ("layer", "head", "roles", "raw", "folded")}, **scores}


def _place(cost: Mapping[str, Any]) -> dict[str, Any]:
    """A row of costs with all columns: those of all heads have no layer."""
    return {"layer": None, "head": None, "gain": 0.0, "kind": "mean", "means": "position", **cost}
