"""Study `datapoints`: cross-row attention compared with gradient-boosted trees, nearest neighbours and MLPs.

Test errors on the published folds of four small tables. Corrupted rows, the two factors of the published protocol,
kernels between rows and look-ups, whose rows the published reading holds, were run at commit 7792c819.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from keyquery.learn.inputs.tables import Rows as Encoded
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import Plan, Samples, answers, drawing, table_loss, target_cost
from keyquery.learn.training import train
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.files import find_packed, read_text
from keyquery_studies.archive import DatapointStudy
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.study import Study, Trial, option

PROTOCOLS, MODELS = ("published", "inductive"), ("boosting", "neighbours", "perceptron")
FILES = {name: f"uci_{name}_data.txt" for name in ("boston", "yacht", "concrete")}  # breast comes with scikit-learn
CATEGORICAL = {"boston": (3, 8), "yacht": (0, 1, 2, 3, 4)}  # numeric columns that are categorical, as published
FOLDS = {"boston": 10, "yacht": 3, "concrete": 3, "breast": 10}  # of ten; the published protocol takes hours on two
# Embedding, steps and learning rate as published; constant for half of the steps, then cosine decay.
PUBLISHED = {
    "boston": (128, 2000, 1e-3),
    "yacht": (128, 10_000, 1e-3),
    "concrete": (128, 10_000, 1e-3),
    "breast": (32, 2000, 5e-4),
}
DEPTH, HEADS, SPLIT = 8, 8, 42  # of the networks; seed of the published folds
LEAST = 1e-6  # lower bound on probabilities, so that logarithms are finite


class Fold(NamedTuple):
    """Features and targets of a table, its categorical columns, and the rows of a fold: training, validation, test."""

    x: Float64[np.ndarray, "n d"]
    y: Float64[np.ndarray, " n"]
    categorical: tuple[int, ...]
    rows: tuple[Int[np.ndarray, " learned"], Int[np.ndarray, " held"], Int[np.ndarray, " test"]]
    classes: int  # 0: regression

    @property
    def unit(self) -> tuple[float, float]:
        """Mean and standard deviation of the training targets."""
        learned = self.y[self.rows[0]]
        return (0.0, 1.0) if self.classes else (float(learned.mean()), float(learned.std()))


def fold_of(table: str, data: str | None, number: int) -> Fold:
    """A published fold of a table: scikit-learn's, a tenth to test on and a fifth to validate on."""
    selection = optional("sklearn.model_selection", "a fold")
    if table == "breast":
        bunch = optional("sklearn.datasets", "the table of breast cancer").load_breast_cancer()
        x, y, classes = bunch.data, 1.0 - bunch.target, 2  # "benign" is the first class
    else:
        if data is None:
            raise ValueError(f"table {table!r} needs {FILES[table]} in the folder of data (--data)")
        values = np.loadtxt(io.StringIO(read_text(find_packed(Path(data), FILES[table]))))
        x, y, classes = values[:, :-1], values[:, -1], 0
    folds = (selection.StratifiedKFold if classes else selection.KFold)(10, shuffle=True, random_state=SPLIT)
    rest, test = list(folds.split(x, y if classes else None))[number]
    strata = y[rest] if classes else None
    learned, held = selection.train_test_split(rest, test_size=0.2 / 0.9, stratify=strata, random_state=SPLIT)
    return Fold(x, y, CATEGORICAL.get(table, ()), (np.sort(learned), np.sort(held), test), classes)


def samples_of(fold: Fold, protocol: str) -> tuple[Samples, list[int]]:
    """Encoded rows, the target last, and the sizes of their columns.

    As published, columns are standardised over all rows and test rows are in the table, without targets; otherwise over
    training and validation rows.
    """
    learned, held, test = fold.rows
    known = np.arange(len(fold.y)) if protocol == "published" else np.concatenate((learned, held))
    values, codes = np.zeros((len(fold.y), fold.x.shape[1] + 1)), np.zeros((len(fold.y), fold.x.shape[1] + 1), int)
    hidden, sizes = np.zeros(values.shape, bool), []
    for column, x in enumerate(fold.x.T):
        if column in fold.categorical:
            levels = np.unique(x[known])
            codes[:, column] = np.searchsorted(levels, x).clip(max=len(levels) - 1)
            hidden[:, column] = levels[codes[:, column]] != x  # a category that only test rows have
            sizes.append(len(levels))
        else:
            values[:, column] = (x - x[known].mean()) / (x[known].std() or 1.0)
            sizes.append(0)
    mean, scale = fold.unit
    values[:, -1], codes[:, -1] = (0.0, fold.y) if fold.classes else ((fold.y - mean) / scale, 0)
    rows = Encoded(torch.from_numpy(values).float(), torch.from_numpy(codes), torch.from_numpy(hidden))
    bare = np.concatenate((held, test)) if protocol == "published" else test[:0]
    return Samples(rows, learned, held, bare), [*sizes, fold.classes]


@torch.no_grad()
def predicted(network: TableNetwork, samples: Samples, plan: Plan, rows: Int[np.ndarray, " some"]) -> Tensor:
    """Targets of rows: as published in one table without targets, otherwise each with the training rows as context."""
    if plan.published:
        output = network(*plan.shown(samples.rows).within())
        return network.target(output)[0, torch.from_numpy(rows).to(output.device)]
    memories = network.memories(plan.shown(samples.rows.take(samples.context)).within())
    return answers(network, samples.without_target(rows), memories)


def metrics_of(outputs: Float64[np.ndarray, "n k"], fold: Fold, part: int) -> dict[str, float]:
    """RMSE in the target's units, or accuracy and NLL; `outputs` are logits, or one standardised number."""
    truth, (mean, scale) = fold.y[fold.rows[part]], fold.unit
    if not fold.classes:
        return {"rmse": float(np.sqrt(np.square(scale * outputs[:, 0] + mean - truth).mean()))}
    likely = outputs - np.logaddexp.reduce(outputs, axis=1, keepdims=True)
    nll = -likely[np.arange(len(truth)), truth.astype(int)].mean()
    return {"accuracy": float((outputs.argmax(1) == truth).mean()), "nll": float(nll)}


@dataclass(frozen=True, kw_only=True)
class NetworkTrial(Trial):
    """One network on one fold.

    "published" (transductive): test rows are part of the training table, without targets, and every target is masked.
    "inductive": test rows are absent from training; half of the targets are masked at each step, and each test row is
    predicted by itself.
    """

    table: str
    data: str | None
    fold: int
    protocol: str
    steps: int | None  # None: those of the protocol
    embedding: int | None

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train and test."""
        fold = fold_of(self.table, self.data, self.fold)
        samples, sizes = samples_of(fold, self.protocol)
        samples = Samples(samples.rows.to(device), samples.learned, samples.held, samples.bare)
        embedding, steps, plan = 64, 2000, Plan()
        if self.protocol == "published":
            embedding, steps, lr = PUBLISHED[self.table]
            options: dict[str, Any] = {"target_share": 1.0, "checks": 100, "patience": None, "published": True}
            plan = Plan(lr=lr, flat=0.5, bf16=False, **options)
        embedding, steps = self.embedding or embedding, self.steps or steps
        torch.manual_seed(0)
        options = {"dropout": plan.dropout, "published": plan.published}
        network = TableNetwork(sizes, embedding, DEPTH, HEADS, **options).to(device)

        def validate(model: nn.Module) -> float:
            outputs = predicted(network, samples, plan, samples.held)
            return float(target_cost(outputs, samples.rows.take(samples.held)))

        draw = drawing(samples, network.sizes, plan, steps, plan.batch)
        log = train(network, draw, table_loss, plan.recipe(steps, 0), validate=validate)
        outputs = predicted(network, samples, plan, fold.rows[2]).double().cpu().numpy()
        facts = {"kernel": "general", "part_of": "npt", "best_step": log.best_step, "device": device_name(device)}
        return {**self.settings(), **facts, **metrics_of(outputs, fold, 2)}


@dataclass(frozen=True, kw_only=True)
class BaselineTrial(Trial):
    """One kind of scikit-learn model on one fold: the best of its settings on validation is tested."""

    table: str
    data: str | None
    fold: int
    model: str

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Fit every setting on the training rows, choose, test, without refitting."""
        fold = fold_of(self.table, self.data, self.fold)
        best: tuple[float, dict[str, float]] = (np.inf, {})
        for held, test in fitted(self.model, fold):
            cost = metrics_of(held, fold, 1)["nll" if fold.classes else "rmse"]
            if cost < best[0]:
                best = (cost, metrics_of(test, fold, 2))
        return {**self.settings(), **best[1]}


def fitted(model: str, fold: Fold) -> Iterator[list[Float64[np.ndarray, "n k"]]]:
    """Predictions for validation and test rows by every setting; those of trees by every number of them."""
    libraries = ("ensemble", "neighbors", "neural_network", "preprocessing")
    ensemble, near, networks, process = (optional(f"sklearn.{name}", "a baseline") for name in libraries)
    suffix, (mean, scale) = "Classifier" if fold.classes else "Regressor", fold.unit
    x, y = fold.x, fold.y if fold.classes else (fold.y - mean) / scale
    if model != "boosting":  # distances and products need one-hot categories and standardised numbers
        compose, others = optional("sklearn.compose", "a baseline"), list(fold.categorical)
        encoder = process.OneHotEncoder(sparse_output=False, handle_unknown="ignore")
        scaler = compose.ColumnTransformer([("codes", encoder, others)], remainder=process.StandardScaler())
        x = scaler.fit(x[fold.rows[0]]).transform(x)
    learned, held, test = fold.rows
    if model == "boosting":
        kind = getattr(ensemble, f"HistGradientBoosting{suffix}")
        common: dict[str, Any] = {"max_iter": 1000, "early_stopping": False, "random_state": 0}
        for rate, leaves, least in product((0.05, 0.1), (8, 31), (5, 20)):
            settings = {"learning_rate": rate, "max_leaf_nodes": leaves, "min_samples_leaf": least}
            trees = kind(**settings, categorical_features=list(fold.categorical), **common).fit(x[learned], y[learned])
            staged = trees.staged_predict_proba if fold.classes else trees.staged_predict
            for pair in zip(staged(x[held]), staged(x[test]), strict=True):
                yield [outputs_of(part) for part in pair]
        return
    models: list[Any]
    if model == "neighbours":
        kind, counts = getattr(near, f"KNeighbors{suffix}"), (1, 2, 3, 5, 7, 10, 15, 20, 30, 50)
        models = [kind(count, weights=weights) for count in counts for weights in ("uniform", "distance")]
    else:
        kind, sizes = getattr(networks, f"MLP{suffix}"), ((100,), (100, 100))
        options = {"max_iter": 500, "random_state": 0}
        models = [
            kind(hidden_layer_sizes=hidden, alpha=alpha, **options) for hidden in sizes for alpha in (1e-4, 1e-2, 1.0)
        ]
    for one in models:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an MLP may stop at the last epoch
            one.fit(x[learned], y[learned])
        yield [
            outputs_of(getattr(one, "predict_proba" if fold.classes else "predict")(x[rows])) for rows in (held, test)
        ]


def outputs_of(predictions: np.ndarray) -> Float64[np.ndarray, "n k"]:
    """Log-probabilities, or one number."""
    return np.log(predictions.clip(LEAST, 1.0)) if predictions.ndim > 1 else predictions[:, None].astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Datapoints(Study):
    """What is cross-row attention worth? NPTs against gradient-boosted trees, nearest neighbours and MLPs.

    On the published folds, with test rows in the training table as published, and without. Minutes per training on a
    GPU; with --out, an interrupted run is resumed.
    """

    result = DatapointStudy

    data: Path | None = option(None, "A folder of uci_boston_data.txt, uci_yacht_data.txt and uci_concrete_data.txt.")
    tables: tuple[str, ...] = option(tuple(FOLDS), "boston, yacht, concrete or breast.", "table")
    folds: tuple[int, ...] = option((), "A fold, of ten.", "fold")
    steps: int | None = option(None, "Training steps of the networks. Default: set by the protocol.", least=1)
    embedding: int | None = option(None, "Embedding width per table entry. Default: set by the protocol.", least=8)

    def jobs(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Both protocols and all baselines on every fold."""
        for table in self.tables:
            check_choice("table", table, tuple(FOLDS))
        data = None if self.data is None else str(self.data)
        cells = [(table, fold) for table in self.tables for fold in self.folds or range(FOLDS[table])]
        sizes: dict[str, Any] = {"data": data, "steps": self.steps, "embedding": self.embedding}
        networks = [NetworkTrial(table=t, fold=f, protocol=p, **sizes) for t, f in cells for p in PROTOCOLS]
        baselines = [BaselineTrial(table=t, data=data, fold=f, model=m) for t, f in cells for m in MODELS]
        return {"npt": networks, "baselines": baselines}
