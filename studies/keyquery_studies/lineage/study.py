"""Study `lineage`: small models of one config and of others, what is made from them, and what the tests say of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from keyquery.capture.load import pick_device
from keyquery.reading import Reading, provenance
from keyquery.support.files import append_line, write_all
from keyquery_studies.common.runner import device_name, study_folder
from keyquery_studies.lineage.kin import kin_of
from keyquery_studies.lineage.models import Size, Weights, joined, picked, save
from keyquery_studies.lineage.pairs import kin, unrelated
from keyquery_studies.lineage.summary import kinds, nulls
from keyquery_studies.lineage.training import Plan, Texts, bases, offspring, single

CHUNK = 24  # pairs per task


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


class Pool:
    """Processes that compute rows, which are written as JSON lines as they come."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.pending = folder, dict[Future[Any], str]()
        self.executor = ProcessPoolExecutor(workers, get_context("spawn"))

    def put(self, name: str, job: Callable[..., Any], *arguments: Any) -> None:
        """Rows of `job` go to the file `name`."""
        future = self.executor.submit(job, *arguments)
        self.pending[future] = name
        future.add_done_callback(self._write)

    def _write(self, future: Future[Any]) -> None:
        if future.cancelled() or future.exception():
            return
        rows = future.result()
        for row in rows if isinstance(rows, list) else [rows]:
            append_line(self.folder / f"{self.pending[future]}.jsonl", json.dumps(row))

    def close(self) -> None:
        """Wait for all rows; the first failure is raised."""
        self.executor.shutdown()
        for future in self.pending:
            future.result()


def run(
    texts: Sequence[str | Path],
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    calibration: str | Path | None = None,
) -> Kinship:
    """Train all models, and test all pairs; rows are written to `out` as they come.

    `calibration` is the reading of an earlier run with another seed, whose unrelated pairs are kept beside these.
    """
    plan, device = plan or Plan(), pick_device(device)
    earlier = [] if calibration is None else _calibration(Path(calibration), plan)
    torch.set_float32_matmul_precision("high")
    with study_folder(out) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.jsonl"):
            old.unlink()
        pool = Pool(folder, workers)
        try:
            _trained_and_tested(plan, Texts([Path(path) for path in texts], device), folder / "models", pool, device)
        finally:
            pool.close()
        return collected(folder, plan, device, earlier)


def _calibration(path: Path, plan: Plan) -> list[dict[str, Any]]:
    reading = Reading.load(path)
    if not isinstance(reading, Kinship):
        raise ValueError(f"{path} is not a reading of the study lineage")
    if reading.provenance["plan"]["seed"] == plan.seed:
        raise ValueError(f"the calibration must have another seed than {plan.seed}: its models would be the same")
    return [{**row, "set": "calibrate"} for row in reading.null if row["set"] == "test"]


def collected(folder: Path, plan: Plan, device: str, earlier: Sequence[Mapping[str, Any]] = ()) -> Kinship:
    """The reading of the rows in a folder, after those of unrelated pairs of an earlier run."""
    null, related = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        for path in (folder / "null.jsonl", folder / "kin.jsonl")
    )
    steps = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    facts = provenance(plan=asdict(plan), device=device_name(device), steps=steps)
    return Kinship(null=[*earlier, *null], kin=related, provenance=facts)


def _trained_and_tested(plan: Plan, texts: Texts, folder: Path, pool: Pool, device: str) -> None:
    size, parents = plan.sizes[0], plan.parents
    first, steps = bases(plan, texts, device)
    write_all({folder.parent / "steps.json": json.dumps(steps)})
    for group, weights in first.items():
        _saved({own.name: own for own in plan.sizes}.get(group, size), weights, folder, group)
    _test_unrelated(pool, folder, range(plan.bases), {"config": size.name, "set": "test"})
    for other in plan.sizes[1:]:
        _test_unrelated(pool, folder, range(plan.others), {"config": other.name, "set": "test"}, other.name)
    if not parents:
        return
    losses = texts.losses(size, first["base"], plan)
    tuned = offspring(plan, texts, picked(first["base"], parents), device)
    groups = {kind: first[kind] for kind in ("same data", "same seed")} | {"distilled": tuned.pop("distilled")}
    _saved(size, groups["distilled"], folder, "distilled")
    for kind, weights in groups.items():
        own = texts.losses(size, weights, plan)
        for number, base in enumerate(parents):
            facts = {"kind": kind, "base": base, "loss": own[number], "base_loss": losses[base]}
            pool.put("kin", kin, folder, f"base-{base}", f"{kind}-{number}", (), facts)
    for number, base in enumerate(parents):
        own_tuned = {name: single(weights, number) for name, weights in tuned.items()}
        stranger = parents[number - 1]
        made = list(kin_of(size, single(first["base"], base), own_tuned, single(first["base"], stranger), base))
        _test_kin(pool, plan, texts, folder, made, base, stranger, losses[base], device)


def _saved(size: Size, weights: Weights, folder: Path, group: str) -> None:
    for number in range(len(weights["query"])):
        save(size, single(weights, number), folder / f"{group}-{number}")


def _test_unrelated(
    pool: Pool, folder: Path, numbers: Sequence[int], facts: Mapping[str, Any], group: str = "base"
) -> None:
    pairs = [(f"{group}-{a}", f"{group}-{b}") for a, b in itertools.combinations(numbers, 2)]
    for start in range(0, len(pairs), CHUNK):
        pool.put("null", unrelated, folder, pairs[start : start + CHUNK], facts)


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
        pool.put("kin", kin, folder, names[model.source], names[model.kind], others, facts)
    strangers = [(f"base-{stranger}", names[m.kind]) for m in made if "other" not in m.others]
    pool.put("null", unrelated, folder, strangers, {"config": size.name, "set": "changed"})


def _losses(texts: Texts, plan: Plan, models: Sequence[Mapping[str, torch.Tensor]], device: str) -> Iterator[float]:
    """Validation losses, of models with equal numbers of layers at once."""
    found: dict[int, float] = {}
    for depth in {len(model["query"]) for model in models}:
        alike = [i for i, model in enumerate(models) if len(model["query"]) == depth]
        stacked = joined([{name: value[None].to(device) for name, value in models[i].items()} for i in alike])
        found |= dict(zip(alike, texts.losses(plan.sizes[0], stacked, plan), strict=True))
    return (found[i] for i in range(len(models)))
