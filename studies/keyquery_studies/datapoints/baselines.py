"""scikit-learn models on the same folds: gradient-boosted trees, nearest neighbours, MLPs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter, time
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Shaped

from keyquery.learn.data.tables import Table
from keyquery.learn.inputs.sequences import statistics
from keyquery.support.checks import check_choice, check_count
from keyquery.support.extras import optional
from keyquery_studies.common.store import result_name
from keyquery_studies.datapoints.folds import Fold
from keyquery_studies.datapoints.predictions import metrics_of
from keyquery_studies.datapoints.tables import TABLES, load_kept, split_of, target_of

MODELS = ("boosting", "neighbours", "perceptron")
LEAST = 1e-6  # lower bound on probabilities, so that logarithms are finite
BOOSTING: dict[str, Any] = {
    "learning_rate": (0.05, 0.1),
    "max_leaf_nodes": (8, 31),
    "min_samples_leaf": (5, 20),
    "iterations": 1000,
}
NEIGHBOURS: dict[str, Any] = {"count": (1, 2, 3, 5, 7, 10, 15, 20, 30, 50), "weights": ("uniform", "distance")}
PERCEPTRON: dict[str, Any] = {"hidden": ((100,), (100, 100)), "alpha": (1e-4, 1e-2, 1.0), "epochs": 500}


class Parts(NamedTuple):
    """Features and targets of the training, validation and test split; for trees, which features are categorical."""

    features: list[Float64[np.ndarray, "n d"]]
    targets: list[Shaped[np.ndarray, " n"]]
    categorical: list[bool]


Fitted = tuple[dict[str, Any], Float64[np.ndarray, "held k"], Float64[np.ndarray, "test k"]]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One kind of model on one fold: every setting is fitted on the training split, and the best on validation is
    tested, without refitting.
    """

    table: str
    digest: str
    fold: int
    model: str
    seed: int = 0
    deadline: float | None = None  # Unix time after which it is not started

    def __post_init__(self) -> None:
        check_choice("table", self.table, tuple(TABLES))
        check_choice("model", self.model, MODELS)
        check_count("fold", self.fold, least=0, most=TABLES[self.table].folds - 1)

    @property
    def name(self) -> str:
        """The name of its result file."""
        return result_name((self.table, self.model, self.fold), self._settings())

    def _settings(self) -> dict[str, Any]:
        grid = {"boosting": BOOSTING, "neighbours": NEIGHBOURS, "perceptron": PERCEPTRON}[self.model]
        return {**{key: value for key, value in asdict(self).items() if key != "deadline"}, "tried": grid}

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Fit every setting, choose, test."""
        if self.deadline is not None and time() >= self.deadline:
            return {**self._settings(), "partial": True}
        table = load_kept(folder, self.table, self.digest)
        fold = split_of(self.table, table, self.fold)
        classes = len(table.categories[table.target or 0]) if TABLES[self.table].classes else 0
        parts = trees_of(table, fold) if self.model == "boosting" else numbers_of(table, fold)
        mean, scale = (0.0, 1.0) if classes else _units(parts.targets[0])
        parts = parts._replace(targets=parts.targets if classes else [(y - mean) / scale for y in parts.targets])
        before, best = perf_counter(), (np.inf, dict[str, Any](), np.empty((0, 1)))
        threads = optional("threadpoolctl", "a baseline")  # other workers share the CPU
        with threads.threadpool_limits(torch.get_num_threads()):
            for settings, held, test in FITTED[self.model](parts, classes, self.seed):
                metrics = metrics_of(held, parts.targets[1], scale)
                cost = metrics["nll" if classes else "rmse"]
                assert cost is not None
                if cost < best[0]:
                    best = (cost, settings, test)
        sizes = {"learned": len(fold.learned), "held": len(fold.held), "test": len(fold.test)}
        test_metrics = metrics_of(best[2], parts.targets[2], scale)
        return {**self._settings(), **sizes, "chosen": best[1], **test_metrics, "seconds": perf_counter() - before}


def _units(target: Float64[np.ndarray, " n"]) -> tuple[float, float]:
    mean, scale = statistics([target[:, None]])
    return float(mean[0]), float(scale[0])


def trees_of(table: Table, fold: Fold) -> Parts:
    """Features for trees: numbers and codes, NaN where missing."""
    kept = [number for number in range(len(table.columns)) if number != table.target]
    columns = [
        np.where(table.values[number] < 0, np.nan, table.values[number])
        if table.categories[number]
        else table.values[number]
        for number in kept
    ]
    features = np.stack(columns, 1).astype(np.float64)
    return Parts(
        [features[places] for places in fold],
        [target_of(table)[places] for places in fold],
        [bool(table.categories[number]) for number in kept],
    )


def numbers_of(table: Table, fold: Fold) -> Parts:
    """Features for distances and products: standardised over training rows, categories one-hot."""
    columns = []
    for number, values in enumerate(table.values):
        if number == table.target:
            continue
        if table.categories[number]:
            columns += [(values == code).astype(np.float64) for code in range(len(table.categories[number]))]
        else:
            mean, scale = _units(values[fold.learned])
            columns.append(np.nan_to_num((values - mean) / scale))  # missing values become the mean
    features = np.stack(columns, 1)
    return Parts([features[places] for places in fold], [target_of(table)[places] for places in fold], [])


def _likely(model: Any, classes: int, probabilities: Float64[np.ndarray, "n some"]) -> Float64[np.ndarray, "n k"]:
    """Log-probabilities of all classes, including those absent from training."""
    whole = np.zeros((len(probabilities), classes))
    whole[:, model.classes_] = probabilities
    return np.log(whole.clip(LEAST, 1.0))


def _predictions(model: Any, classes: int, features: Float64[np.ndarray, "n d"]) -> Float64[np.ndarray, "n k"]:
    if classes:
        return _likely(model, classes, model.predict_proba(features))
    return np.asarray(model.predict(features), dtype=np.float64)[:, None]


def _boosting(parts: Parts, classes: int, seed: int) -> Iterator[Fitted]:
    """Histogram gradient boosting; the number of trees is selected on the validation split."""
    ensemble = optional("sklearn.ensemble", "a baseline")
    kind = ensemble.HistGradientBoostingClassifier if classes else ensemble.HistGradientBoostingRegressor
    tried = ("learning_rate", "max_leaf_nodes", "min_samples_leaf")
    for values in product(*(BOOSTING[name] for name in tried)):
        settings = dict(zip(tried, values, strict=True))
        model = kind(
            **settings,
            max_iter=BOOSTING["iterations"],
            early_stopping=False,
            categorical_features=parts.categorical,
            random_state=seed,
        ).fit(parts.features[0], parts.targets[0])
        stages = model.staged_predict_proba if classes else model.staged_predict
        both = zip(stages(parts.features[1]), stages(parts.features[2]), strict=True)
        for count, pair in enumerate(both, 1):
            predictions = [_likely(model, classes, outputs) if classes else outputs[:, None] for outputs in pair]
            yield {**settings, "iterations": count}, predictions[0], predictions[1]


def _neighbours(parts: Parts, classes: int, seed: int) -> Iterator[Fitted]:
    neighbours = optional("sklearn.neighbors", "a baseline")
    kind = neighbours.KNeighborsClassifier if classes else neighbours.KNeighborsRegressor
    for count, weights in product(NEIGHBOURS["count"], NEIGHBOURS["weights"]):
        if count <= len(parts.features[0]):
            model = kind(count, weights=weights).fit(parts.features[0], parts.targets[0])
            held, test = (_predictions(model, classes, features) for features in parts.features[1:])
            yield {"count": count, "weights": weights}, held, test


def _perceptron(parts: Parts, classes: int, seed: int) -> Iterator[Fitted]:
    networks, unfinished = (optional(f"sklearn.{part}", "a baseline") for part in ("neural_network", "exceptions"))
    kind = networks.MLPClassifier if classes else networks.MLPRegressor
    for hidden, alpha in product(PERCEPTRON["hidden"], PERCEPTRON["alpha"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", unfinished.ConvergenceWarning)  # it may stop at the last epoch
            model = kind(hidden_layer_sizes=hidden, alpha=alpha, max_iter=PERCEPTRON["epochs"], random_state=seed)
            model.fit(parts.features[0], parts.targets[0])
        held, test = (_predictions(model, classes, features) for features in parts.features[1:])
        yield {"hidden": list(hidden), "alpha": alpha, "epochs": model.n_iter_}, held, test


FITTED: dict[str, Callable[[Parts, int, int], Iterator[Fitted]]] = {
    "boosting": _boosting,
    "neighbours": _neighbours,
    "perceptron": _perceptron,
}
