"""NPTClassifier and NPTRegressor: a table in, the targets of new rows out, by attention between datapoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int, Shaped
from torch import Tensor

from keyquery.estimators.base import classes_of, label_facts, labels_of, numbers_of
from keyquery.estimators.inputs.sequences import statistics
from keyquery.estimators.inputs.tables import Field
from keyquery.estimators.npt.base import Coded, Datapoints, target_of

FARTHEST = 1e18  # standard deviations from the mean, whose square single precision still holds


class NPTClassifier(Datapoints):
    """Classes of the rows of a table, by attention between datapoints: a row is told from what other rows are.

    X is a data frame, a `kq.data.Table`, an array or a list of rows; columns of numbers and of categories (texts,
    booleans, pandas' own) are told apart, and values may be missing. The training rows are kept, and new rows attend to
    them, never to each other: `predict` gives the same for a row whatever else is asked. `context` keeps a stratified
    sample of so many in their place; "all" has those in it, too, that were held out to stop early.

    `kernel` is any of `kq.Attention`. `row_attention` is "full", "induced", whose cost grows with the number of rows
    and not with its square, or "none", which tells each row from its own entries. With `semi_supervised`, y may be
    missing (None, NaN): such rows are seen without a target, and so are those held out.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(60, 2))
    >>> y = np.where(X[:, 0] > 0, "right", "left")
    >>> model = kq.NPTClassifier(embedding=8, depth=2, heads=2, steps=150, random_state=0, device="cpu")
    >>> model.fit(X[:40], y[:40]).score(X[40:], y[40:]) > 0.8
    True
    """

    _estimator_type = "classifier"
    classes_: Shaped[np.ndarray, " classes"]

    def predict_proba(self, X: Any) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (n, classes), in the order of `classes_`."""
        return self._answers(X).softmax(-1).numpy()

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """The likeliest class of each row."""
        found = self._answers(X)  # first: what is not fitted has no classes
        return self.classes_[found.argmax(1).numpy()]

    def score(self, X: Any, y: Any = None) -> float:
        """The share of rows whose class is predicted; y may be left out where X is a `kq.data.Table` with a target."""
        found = self.predict(X)
        truth = labels_of(type(self).__name__, target_of(X) if y is None else y, len(found))
        return float(np.mean(found == truth))

    def _given(self, y: Any, count: int) -> Shaped[np.ndarray, " n"]:
        labels = labels_of(type(self).__name__, y, count)
        if count > 1 and len(np.unique(labels)) < 2:
            raise ValueError(f"y holds only one class, {labels.tolist()[0]!r}: a classifier needs two or more")
        return labels

    def _strata(self, given: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
        return given

    def _coded(self, given: Shaped[np.ndarray, " n"], learned: Int[np.ndarray, " some"]) -> Coded:
        classes, codes = np.unique(given, return_inverse=True)
        named = tuple(map(str, range(len(classes))))
        return Coded(Field("target", categories=named), np.zeros(len(given)), codes.astype(np.int64))

    def _keep(self, given: Shaped[np.ndarray, " n"]) -> None:
        self.classes_ = np.unique(given)

    def _names(self) -> list[Any]:
        return list(label_facts(self.classes_)["labels"])

    def _facts(self) -> dict[str, Any]:
        return {"classes": label_facts(self.classes_)}

    def _take(self, facts: Mapping[str, Any]) -> None:
        self.classes_ = classes_of(facts["classes"])
        if len(self.classes_) != self.fields_[-1].size:
            raise ValueError("its classes are not those of its target")

    def _odds(self, said: Float64[Tensor, "n k"], chosen: int) -> Float64[Tensor, " n"]:
        others = torch.cat((said[:, :chosen], said[:, chosen + 1 :]), 1)
        return said[:, chosen] - others.logsumexp(1)

    def _told(self, said: Float64[Tensor, " k"]) -> dict[str, Any]:
        chosen = int(said.argmax())
        return {"predicted": self._names()[chosen], "probability": float(said.softmax(-1)[chosen])}


class NPTRegressor(Datapoints):
    """Numbers that belong to the rows of a table, by attention between datapoints.

    All but the target is as in `kq.NPTClassifier`; `score` is R².

    >>> X = np.random.default_rng(0).normal(size=(60, 2))
    >>> model = kq.NPTRegressor(embedding=8, depth=2, heads=2, steps=150, random_state=0, device="cpu")
    >>> model.fit(X[:40], 3 * X[:40, 0]).score(X[40:], 3 * X[40:, 0]) > 0.7
    True
    """

    _estimator_type = "regressor"

    def predict(self, X: Any) -> Float64[np.ndarray, " n"]:
        """The number of each row."""
        found = self._answers(X)[:, 0].numpy()
        return found * self.fields_[-1].scale + self.fields_[-1].mean

    def score(self, X: Any, y: Any = None) -> float:
        """R² = 1 − Σ(y − ŷ)²/Σ(y − ȳ)²; y may be left out where X is a `kq.data.Table` with a target."""
        found = self.predict(X)
        truth = numbers_of(type(self).__name__, target_of(X) if y is None else y, len(found))
        left, all_ = np.square(truth - found).sum(), np.square(truth - truth.mean()).sum()
        return float(1 - left / all_) if all_ > 0 else float(left == 0)

    def _given(self, y: Any, count: int) -> Float64[np.ndarray, " n"]:
        return numbers_of(type(self).__name__, y, count)

    def _strata(self, given: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
        return np.zeros(len(given))

    def _coded(self, given: Shaped[np.ndarray, " n"], learned: Int[np.ndarray, " some"]) -> Coded:
        mean, scale = statistics([given[learned, None]], "y")
        field = Field("target", float(mean[0]), float(scale[0]))
        values = (given - field.mean) / field.scale
        if (most := float(np.abs(values).max())) > FARTHEST:
            raise ValueError(f"y holds values too large: up to {most:.0e} standard deviations of the others")
        return Coded(field, values, np.zeros(len(given), dtype=np.int64))

    def _odds(self, said: Float64[Tensor, "n k"], chosen: int) -> Float64[Tensor, " n"]:
        return said[:, 0] * self.fields_[-1].scale

    def _told(self, said: Float64[Tensor, " k"]) -> dict[str, Any]:
        return {"predicted": float(said[0] * self.fields_[-1].scale + self.fields_[-1].mean), "probability": None}
