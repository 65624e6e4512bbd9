"""Study `lineage`: small models of one config and of others, what is made from them, and what the tests say of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from keyquery.reading import Reading, provenance
from keyquery.support.devices import pick_device
from keyquery_studies.common.runner import study_folder
from keyquery_studies.lineage.kin import kin_of
from keyquery_studies.lineage.models import Size, Weights, joined, picked, save
from keyquery_studies.lineage.pairs import kin, unrelated
from keyquery_studies.lineage.rows import (
    Pool,
    check_plan,
    clear,
    is_complete,
    load_groups,
    mark_complete,
    read_facts,
    rows_of,
    save_groups,
    without,
    write_facts,
)
from keyquery_studies.lineage.summary import kinds, nulls
from keyquery_studies.lineage.training import Plan, Texts, bases, offspring, single

CHUNK = 24  # pairs per task
BASES = 0.5  # of the time limit: the share of the bases
SETS = ("test", "changed", "calibrate")  # of unrelated pairs
PARTS = {"all": ("bases", "kin"), "bases": ("bases",), "kin": ("kin",), "rows": ()}


@dataclass(frozen=True, kw_only=True)
class Kinship(Reading, kind="lineage study"):
    """Statistics of unrelated and of related pairs of models."""

    null: Sequence[Mapping[str, Any]]  # one per unrelated pair: "config", "set" (calibrate, test, changed), statistics
    kin: Sequence[Mapping[str, Any]]  # one per model made from a base: "kind", statistics, label, change, loss

    def records(self) -> list[dict[str, Any]]:
        """One row per model made from a base."""
        names = {"free": "basis_free", "shared": "shared_basis"}
        return [{names.get(name, name): value for name, value in row.items()} for row in self.kin]

    def summary(self) -> list[dict[str, Any]]:
        """Unrelated pairs by config, set and test; then models made from a base, by kind."""
        return [*self.nulls(), *self.kinds()]

    def nulls(self) -> list[dict[str, Any]]:
        """Per config, set and test: the statistic of unrelated pairs, false alarms, and whether p is uniform."""
        return nulls(self.null)

    def kinds(self) -> list[dict[str, Any]]:
        """Per kind: area under the ROC curve of each test against the unrelated test pairs, change, loss, labels."""
        return kinds(self.kin, self.null)


def run(
    texts: Sequence[str | Path],
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    calibration: str | Path | None = None,
    part: str = "all",
) -> Kinship:
    """Train all models, and test all pairs; rows are written to `out` as they come.

    A part that `out` holds is not computed again: "bases" are trained and compared with one another, "kin" is made of
    them, "rows" computes nothing. `calibration` is the reading of an earlier run with another seed, whose unrelated
    pairs are kept beside these.
    """
    plan, device = plan or Plan(), pick_device(device)
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, not {part!r}")
    torch.set_float32_matmul_precision("high")
    with study_folder(out) as folder:
        if part == "rows":  # whatever the settings were
            seed = read_facts(folder)["plan"]["seed"]
        else:
            folder.mkdir(parents=True, exist_ok=True)
            check_plan(folder, plan)
            seed = plan.seed
        earlier = [] if calibration is None else _calibration(Path(calibration), seed)
        todo = [name for name in PARTS[part] if not is_complete(folder, name)]
        if todo:
            pool = Pool(folder, workers)
            try:
                _computed(todo, plan, Texts([Path(path) for path in texts], device), folder, pool, device)
            finally:
                pool.close()
            for name in todo:
                mark_complete(folder, name)
        return collected(folder, plan, earlier)


def _calibration(path: Path, seed: int) -> list[dict[str, Any]]:
    reading = Reading.load(path)
    if not isinstance(reading, Kinship):
        raise ValueError(f"{path} is not a reading of the study lineage")
    if reading.provenance["plan"]["seed"] == seed:
        raise ValueError(f"the calibration must have another seed than {seed}: its models would be the same")
    rows = [row for row in reading.null if row["set"] in ("test", "calibrate")]
    names = [{side: f"{row['set']} {row[side]}" for side in ("first", "second")} for row in rows]  # of two earlier runs
    return [{**row, "set": "calibrate", **own} for row, own in zip(rows, names, strict=True)]


def collected(folder: Path, plan: Plan, earlier: Sequence[Mapping[str, Any]] = ()) -> Kinship:
    """The reading of the rows in a folder, and of those of unrelated pairs of an earlier run."""
    place = {size.name: number for number, size in enumerate(plan.sizes)}
    facts, related = read_facts(folder), rows_of(folder, "kin")
    null = [*rows_of(folder, "null", "changed"), *earlier]
    null.sort(key=lambda row: (SETS.index(row["set"]), place[row["config"]]))
    return Kinship(null=null, kin=related, provenance=provenance(**facts))


def _computed(todo: Sequence[str], plan: Plan, texts: Texts, folder: Path, pool: Pool, device: str) -> None:
    """Trainings of the parts; the pool has their pairs."""
    start = monotonic()
    groups = load_groups(folder / "trained", device) if (folder / "facts.json").exists() else {}
    if not groups:
        groups, steps = bases(plan, texts, device, start + BASES * plan.seconds)
        save_groups(folder / "trained", groups)
        write_facts(folder, plan, device, steps)
    models = folder / "models"
    for group, weights in groups.items():
        _saved({own.name: own for own in plan.sizes}.get(group, plan.sizes[0]), weights, models, group)
    if "bases" in todo:
        _test_bases(pool, plan, models)
    if "kin" in todo and plan.parents:
        clear(folder, "kin")
        _test_offspring(pool, plan, texts, models, groups, device, start + plan.seconds)


def _test_bases(pool: Pool, plan: Plan, models: Path) -> None:
    """All pairs of bases of each config that have no row."""
    for number, size in enumerate(plan.sizes):
        group, count = (size.name, plan.others) if number else ("base", plan.bases)
        pairs = [(f"{group}-{a}", f"{group}-{b}") for a, b in itertools.combinations(range(count), 2)]
        pairs = without(pairs, rows_of(pool.folder, "null"))
        for start in range(0, len(pairs), CHUNK):
            facts = {"config": size.name, "set": "test"}
            pool.put("null", unrelated, models, pairs[start : start + CHUNK], facts)


def _test_offspring(
    pool: Pool, plan: Plan, texts: Texts, models: Path, groups: Mapping[str, Weights], device: str, end: float
) -> None:
    """Train what is trained from the bases, make the rest, and test all of it."""
    size, parents, first = plan.sizes[0], plan.parents, groups["base"]
    losses = texts.losses(size, first, plan)
    tuned = offspring(plan, texts, picked(first, parents), device, end)
    twins = {kind: groups[kind] for kind in ("same data", "same seed")} | {"distilled": tuned.pop("distilled")}
    _saved(size, twins["distilled"], models, "distilled", again=True)  # trained anew after an interruption
    for number, base in enumerate(parents):
        own_tuned = {name: single(weights, number) for name, weights in tuned.items()}
        stranger = parents[number - 1]
        made = list(kin_of(size, single(first, base), own_tuned, single(first, stranger), base))
        _test_kin(pool, plan, texts, models, made, base, stranger, losses[base], device)
    for kind, weights in twins.items():
        own = texts.losses(size, weights, plan)
        for number, base in enumerate(parents):
            facts = {"kind": kind, "base": base, "loss": own[number], "base_loss": losses[base]}
            pool.put("kin", kin, models, f"base-{base}", f"{kind}-{number}", (), f"base-{base}", facts)


def _saved(size: Size, weights: Weights, folder: Path, group: str, again: bool = False) -> None:
    for number in range(len(weights["query"])):
        if again or not (folder / f"{group}-{number}" / "model.safetensors").exists():
            save(size, single(weights, number), folder / f"{group}-{number}")


def _test_kin(
    pool: Pool,
    plan: Plan,
    texts: Texts,
    folder: Path,
    made: Sequence[Any],
    base: int,
    stranger: int,
    base_loss: float,
    device: str,
) -> None:
    """Each model that was made of a base against its source, and against an unrelated base."""
    size = plan.sizes[0]
    names = {"base": f"base-{base}", "other": f"base-{stranger}"}
    names |= {model.kind: f"kin-{base}-{model.kind}" for model in made}
    for model in made:
        save(size, model.weights, folder / names[model.kind])
    for model, value in zip(made, _losses(texts, plan, [model.weights for model in made], device), strict=True):
        facts = {"kind": model.kind, "base": base, "source": model.source, "loss": value, "base_loss": base_loss}
        others = [names[other] for other in model.others]
        start = names[model.start or model.source]
        pool.put("kin", kin, folder, names[model.source], names[model.kind], others, start, facts)
    strangers = [(f"base-{stranger}", names[m.kind]) for m in made if "other" not in m.others]
    pool.put("changed", unrelated, folder, strangers, {"config": size.name, "set": "changed"})


def _losses(texts: Texts, plan: Plan, models: Sequence[Mapping[str, torch.Tensor]], device: str) -> Iterator[float]:
    """Validation losses, of models with equal numbers of layers at once."""
    found: dict[int, float] = {}
    for depth in {len(model["query"]) for model in models}:
        alike = [i for i, model in enumerate(models) if len(model["query"]) == depth]
        stacked = joined([{name: value[None].to(device) for name, value in models[i].items()} for i in alike])
        found |= dict(zip(alike, texts.losses(plan.sizes[0], stacked, plan), strict=True))
    return (found[i] for i in range(len(models)))
