"""One training run of cross-row attention on one fold of one table; resumable."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

import numpy as np
import torch
from torch import nn

from keyquery.layers.kernels import KERNELS
from keyquery.learn.data.tables import Table
from keyquery.learn.inputs.sequences import statistics
from keyquery.learn.inputs.tables import Columns, Field, Rows, columns_of, encode, fields_of
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import Plan, Samples, drawing, recipe_of, table_loss, target_cost
from keyquery.learn.training import train
from keyquery.reading import short
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import checkpoint_path, result_name
from keyquery_studies.datapoints.folds import Fold
from keyquery_studies.datapoints.predictions import metrics_of, predict, predict_corrupted, row_heads
from keyquery_studies.datapoints.tables import TABLES, load_kept, split_of, target_of

PROTOCOLS = ("published", "inductive")
PRECISIONS = ("bf16", "tf32", "full")
CORRUPTED = 200  # test rows of a large table predicted with corrupted rows; of a small one, all
CHECKS = 100  # evaluations of a published run
PARTS = ("symmetric", "on_data", "popularity")  # metrics of a head
DIGITS = 5  # precision of curves and heads, of which there are many
# Embedding, steps and learning rate as published; constant for half of the steps, then cosine decay.
PUBLISHED = {
    "boston": (128, 2000, 1e-3),
    "yacht": (128, 10_000, 1e-3),
    "concrete": (128, 10_000, 1e-3),
    "breast": (32, 2000, 5e-4),
}


def settings_of(table: str, protocol: str) -> dict[str, Any]:
    """Hyperparameters of a protocol: as published for the table, or the same for all tables."""
    check_choice("protocol", protocol, PROTOCOLS)
    if protocol == "published":
        check_choice("table of the published protocol", table, tuple(PUBLISHED))
        embedding, steps, lr = PUBLISHED[table]
        return {"embedding": embedding, "steps": steps, "lr": lr, "flat": 0.5, "precision": "tf32"}
    return {"embedding": 64, "steps": 2000, "lr": None, "flat": Plan.flat, "precision": "bf16"}


@dataclass(frozen=True, kw_only=True)
class TableTrial:
    """One network on one fold.

    Under "published" (transductive), test rows are part of the training table, without targets; every target is masked
    at every step and in prediction, so that no row can read another row's target; the step with the best validation
    loss is used. Under "inductive", test rows are absent from training; half of the targets are masked at each step,
    and each test row is predicted by itself, with the training rows and their targets as context.
    """

    table: str
    digest: str  # of the data
    fold: int
    protocol: str = "inductive"
    kernel: str = "general"  # of attention between rows; between columns it is general
    embedding: int = 64
    depth: int = 8
    heads: int = 8
    steps: int = 2000
    lr: float | None = None
    flat: float = 0.7
    precision: str = "bf16"  # on a GPU; elsewhere full
    seed: int = 0
    deadline: float | None = None  # Unix time after which it is interrupted; not part of the settings

    def __post_init__(self) -> None:
        for name, known in (("table", tuple(TABLES)), ("protocol", PROTOCOLS), ("kernel", KERNELS)):
            check_choice(name, getattr(self, name), known)
        check_choice("precision", self.precision, PRECISIONS)
        for name in ("embedding", "depth", "heads", "steps"):
            check_count(name, getattr(self, name))
        check_count("fold", self.fold, least=0, most=TABLES[self.table].folds - 1)
        if self.embedding % self.heads:
            raise ValueError(f"heads must divide embedding: {self.heads} does not divide {self.embedding}")

    @property
    def name(self) -> str:
        """The name of its result file."""
        return result_name((self.table, self.protocol, self.kernel, self.fold), self._settings())

    def _settings(self) -> dict[str, Any]:
        settings = {key: value for key, value in asdict(self).items() if key != "deadline"}
        plan = {**asdict(self.plan()), "holdout": 0.2}  # once a field of the plan: names of kept results depend on it
        return {**settings, "plan": plan, "most_corrupted": CORRUPTED}

    def plan(self) -> Plan:
        """The training plan."""
        bf16 = None if self.precision == "bf16" else False
        if self.protocol == "published":
            published: dict[str, Any] = {"target_share": 1.0, "checks": CHECKS, "patience": None, "published": True}
            return Plan(lr=self.lr, flat=self.flat, bf16=bf16, **published)
        return Plan(lr=self.lr, flat=self.flat, bf16=bf16)

    def samples(self, table: Table, fold: Fold) -> tuple[Samples, list[Field]]:
        """The encoded rows that are trained on and predicted, and their fields."""
        return samples_of(table, fold, self.protocol)

    def network(self, sizes: list[int]) -> TableNetwork:
        """The network at initialisation."""
        plan = self.plan()
        torch.manual_seed(self.seed)
        kernels = {"kernel": self.kernel, "column_kernel": "general"}
        options: dict[str, Any] = {"dropout": plan.dropout, "published": plan.published, **kernels}
        return TableNetwork(sizes, self.embedding, self.depth, self.heads, **options)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, test with clean and with corrupted rows, and analyse the cross-row heads."""
        if self.deadline is not None and time() >= self.deadline:
            return {**self._settings(), "partial": True, "steps_run": 0}
        table = load_kept(folder, self.table, self.digest)
        fold = split_of(self.table, table, self.fold)
        samples, fields = self.samples(table, fold)
        samples = Samples(samples.rows.to(device), samples.learned, samples.held, samples.bare)
        with multiplying(self.precision):
            network = self.network([field.size for field in fields]).to(device)
            start = row_heads(network.eval(), _looked_at(samples, self.plan()))
            facts = self._train(network, samples, folder, device)
            if not facts["partial"]:
                facts |= self._tested(network, samples, fold, fields[-1], table)
                heads = row_heads(network, _looked_at(samples, self.plan()))
                facts["row_heads"] = [
                    {**short(head, DIGITS), "at_start": {name: short(before[name], DIGITS) for name in PARTS}}
                    for head, before in zip(heads, start, strict=True)
                ]
        sizes = {"learned": len(fold.learned), "held": len(fold.held), "test": len(fold.test)}
        parameters = sum(weight.numel() for weight in network.parameters())
        return {**self._settings(), **sizes, "parameters": parameters, **facts, "device": device_name(device)}

    def _train(self, network: TableNetwork, samples: Samples, folder: Path, device: str) -> dict[str, Any]:
        plan, held = self.plan(), samples.held
        recipe = recipe_of(plan, self.steps, self.seed)
        truth = samples.rows.take(held)
        done = [0]

        def validate(model: nn.Module) -> float:
            return float(target_cost(predict(model, samples, plan, held), truth))  # type: ignore[arg-type]

        def until(step: int) -> bool:
            done[0] = step
            return self.deadline is not None and time() >= self.deadline

        path = checkpoint_path(folder, self.name)
        draw = drawing(samples, network.sizes, plan, self.steps, plan.batch)
        before = perf_counter()
        log = train(network, draw, table_loss, recipe, validate=validate, until=until, checkpoint=path, spare=True)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return {
            "partial": not log.stopped and done[0] < self.steps,
            "steps_run": done[0],
            "best_step": log.best_step,
            "stopped": log.stopped,
            "validation": log.best if math.isfinite(log.best) else None,  # squared error, standardised, or NLL
            "curve": short([[int(row["step"]), row["loss"], row["validation"]] for row in log.rows], DIGITS),
            "seconds": perf_counter() - before,  # in this process
        }

    def _tested(
        self, network: TableNetwork, samples: Samples, fold: Fold, field: Field, table: Table
    ) -> dict[str, Any]:
        """Metrics on test rows, and on a subset of them with all other rows corrupted."""
        count = min(CORRUPTED, len(fold.test)) if TABLES[self.table].folds == 1 else len(fold.test)
        subset = np.linspace(0, len(fold.test) - 1, count).astype(int)
        plan, truth = self.plan(), _standardised(table, field)[fold.test]
        predicted = predict(network, samples, plan, fold.test).double().cpu().numpy()
        corrupted = predict_corrupted(network, samples, plan, fold.test[subset], seed=self.fold).double().cpu().numpy()
        return {
            **metrics_of(predicted, truth, field.scale),
            "clean": metrics_of(predicted[subset], truth[subset], field.scale),
            "corrupted": metrics_of(corrupted, truth[subset], field.scale),
            "corrupted_rows": count,
        }


def samples_of(table: Table, fold: Fold, protocol: str) -> tuple[Samples, list[Field]]:
    """A table as encoded rows, and its fields; the target column comes last.

    As published, columns are standardised over all rows, including test rows; otherwise over training and validation
    rows. The target is standardised over training rows.
    """
    columns = columns_of(table)
    known = np.arange(len(table)) if protocol == "published" else np.concatenate((fold.learned, fold.held))
    fields = fields_of(Columns(columns.names, [values[known] for values in columns.values]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # categories that only test rows have are encoded as missing
        rows = encode(columns, fields)
    assert table.target is not None
    target, names = target_of(table), table.categories[table.target]
    if names:
        field = Field("target", categories=names)
    else:
        mean, scale = statistics([target[fold.learned, None]])
        field = Field("target", float(mean[0]), float(scale[0]))
    targets = _standardised(table, field)
    numbers, codes = (np.zeros(len(table)), targets) if names else (targets, np.zeros(len(table), dtype=np.int64))
    last = (torch.from_numpy(numbers).float(), torch.from_numpy(codes), torch.zeros(len(table), dtype=torch.bool))
    whole = Rows(*(torch.cat((part, of.unsqueeze(1)), 1) for part, of in zip(rows, last, strict=True)))
    bare = np.concatenate((fold.held, fold.test)) if protocol == "published" else fold.test[:0]
    return Samples(whole, fold.learned, fold.held, bare), [*fields, field]


def _standardised(table: Table, field: Field) -> Any:
    """Targets as a network predicts them: codes, or numbers standardised by `field`."""
    return target_of(table) if field.categories else (target_of(table) - field.mean) / field.scale


def _looked_at(samples: Samples, plan: Plan) -> Rows:
    """The rows whose mutual attention is analysed: the table as it is at prediction."""
    if plan.published:
        return samples.without_target(np.arange(len(samples.rows.hidden)))
    return samples.rows.take(samples.learned[: plan.batch])


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Precision of float32 matrix products on a GPU: TF32 with "tf32", otherwise full."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
