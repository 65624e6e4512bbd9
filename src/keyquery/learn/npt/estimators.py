"""NPTClassifier and NPTRegressor: tabular prediction by attention between datapoints (NPT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int, Shaped
from torch import Tensor

from keyquery.learn.base import Classifier, RegressorMixin
from keyquery.learn.inputs.sequences import statistics
from keyquery.learn.inputs.tables import Field, target_of
from keyquery.learn.inputs.targets import label_facts, labels_of, numbers_of
from keyquery.learn.npt.base import Coded, Datapoints
from keyquery.learn.series.importance import log_odds
from keyquery.support.extras import optional

FARTHEST = 1e18  # standard deviations from the mean; its square still fits float32


@dataclass(eq=False, repr=False)
class NPTClassifier(Classifier, Datapoints):
    """Tabular classifier: a non-parametric transformer (NPT), in which rows attend to other rows.

    From a paper: on four small tables nowhere significantly better than boosted trees or an MLP, on one worse.

    Experimental: on small tables it takes a minute of CPU time and is seldom more accurate than simple classifiers.

    Layers alternate between attention across rows and attention across columns. X is a data frame, a `kq.data.Table`,
    an array or a list of rows, with numeric and categorical columns (text, booleans, pandas categories) and missing
    values. The training rows are kept as a support set; new rows attend to it and never to each other, so that the
    prediction for a row does not depend on the batch. A validation split is used for early stopping.

    Parameters
    ----------
    embedding, depth, heads
        Embedding size per entry, layers and heads. Default: 32, 4, 8; published: 64, 8, 8.
    steps
        Training steps. Default: 400; published: 2,000 and more.
    lr
        Learning rate. Default: 1e-3 as published, more in runs of fewer than 2,000 steps.
    validation_fraction
        Share of each class used as the validation split, if there are 20 rows or more; the weights of the best check
        are kept. Default: 0.2.
    kernel
        Any kernel of `kq.Attention`. Default: "general".
    row_attention
        "full"; "induced", through inducing points, with a cost linear in the number of rows; or "none", attention
        within each row only. Default: "full".
    semi_supervised
        Allow missing targets (None, NaN): such rows, and the validation split, are seen without a target.
        Default: False.
    class_weight
        Weights of classes: None, "balanced" or {label: weight}, as in scikit-learn. Default: None.
    random_state
        Seed: None, an integer or a numpy generator. Default: None.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere lines. Default: False.

    Raises
    ------
    MemoryError
        By `fit`, if training would not fit into memory.

    See Also
    --------
    InContextClassifier : pretrained, without training.
    NPTRegressor : for numeric targets.
    kq.DatapointAttention : the layer.
    kq.data.load_table : reads tables from files.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(60, 2))
    >>> y = np.where(X[:, 0] > 0, "right", "left")
    >>> model = kq.NPTClassifier(embedding=8, depth=2, heads=2, steps=150, random_state=0, device="cpu")
    >>> model.fit(X[:40], y[:40]).score(X[40:], y[40:]) > 0.8
    True
    """

    class_weight: Any = None

    def _logits(self, X: Any) -> Float64[Tensor, "n classes"]:
        return self._answers(X)

    def _targets(self, y: Any, count: int) -> Shaped[np.ndarray, " n"]:
        labels = labels_of(type(self).__name__, y, count)
        if count > 1 and len(np.unique(labels)) < 2:
            raise ValueError(f"y holds only one class, {labels.tolist()[0]!r}: a classifier needs two or more")
        return labels

    def _coded(self, targets: Shaped[np.ndarray, " n"], learned: Int[np.ndarray, " some"]) -> Coded:
        classes, codes = np.unique(targets, return_inverse=True)
        return Field("target", categories=tuple(map(str, range(len(classes))))), codes

    def _odds(self, outputs: Float64[Tensor, "n k"], chosen: int) -> Float64[Tensor, " n"]:
        return log_odds(outputs, chosen)

    def _prediction(self, output: Float64[Tensor, " k"]) -> dict[str, Any]:
        chosen = int(output.argmax())
        label = label_facts(self.classes_)["labels"][chosen]
        return {"predicted": label, "probability": float(output.softmax(-1)[chosen])}


class NPTRegressor(RegressorMixin, Datapoints):  # type: ignore[misc]
    """Tabular regressor: a non-parametric transformer (NPT), in which rows attend to other rows.

    From a paper: on four small tables nowhere significantly better than boosted trees or an MLP, on one worse.

    Experimental: on small tables it takes a minute of CPU time and is seldom more accurate than simple regressors.

    Parameters
    ----------
    embedding, depth, heads, steps, lr, validation_fraction, kernel, row_attention, semi_supervised
        As in `NPTClassifier`, with the same defaults.
    random_state, device, verbose
        As in `NPTClassifier`, with the same defaults.

    See Also
    --------
    NPTClassifier : for categorical targets; its docstring describes the model.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(60, 2))
    >>> model = kq.NPTRegressor(embedding=8, depth=2, heads=2, steps=150, random_state=0, device="cpu")
    >>> model.fit(X[:40], 3 * X[:40, 0]).score(X[40:], 3 * X[40:, 0]) > 0.7
    True
    """

    def predict(self, X: Any) -> Float64[np.ndarray, " n"]:
        """Predicted value of each row (n,).

        Parameters
        ----------
        X
            A table: a `kq.data.Table`, a data frame or an array (n, columns), with the columns of `fit`.

        Returns
        -------
        ndarray
            Predicted value of each row (n,).
        """
        standardised = self._answers(X)[:, 0].numpy()
        return standardised * self.fields_[-1].scale + self.fields_[-1].mean

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R² = 1 − Σ(y − ŷ)²/Σ(y − ȳ)². Default y: the target column, if X is a `kq.data.Table`.

        Parameters
        ----------
        X
            A table: a `kq.data.Table`, a data frame or an array (n, columns), with the columns of `fit`.
        y
            True values (n,). Default: the target column of X.
        sample_weight
            Weight of each row (n,). Default: equal.

        Returns
        -------
        float
            R², at most 1.
        """
        predicted = self.predict(X)
        truth = numbers_of(type(self).__name__, target_of(X, y), len(predicted))
        return float(optional("sklearn.metrics", "R²").r2_score(truth, predicted, sample_weight=sample_weight))

    def _targets(self, y: Any, count: int) -> Float64[np.ndarray, " n"]:
        return numbers_of(type(self).__name__, y, count)

    def _coded(self, targets: Shaped[np.ndarray, " n"], learned: Int[np.ndarray, " some"]) -> Coded:
        mean, scale = statistics([targets[learned, None]], "y")
        field = Field("target", float(mean[0]), float(scale[0]))
        if (targets == targets[0]).all():  # predicted exactly: the scale of the output is 0
            return Field("target", float(targets[0]), 0.0), np.zeros(len(targets))
        values = (targets - field.mean) / field.scale
        if (most := float(np.abs(values).max())) > FARTHEST:
            raise ValueError(f"y holds values too large: up to {most:.0e} standard deviations of the others")
        return field, values

    def _odds(self, outputs: Float64[Tensor, "n k"], chosen: int) -> Float64[Tensor, " n"]:
        return outputs[:, 0] * self.fields_[-1].scale

    def _prediction(self, output: Float64[Tensor, " k"]) -> dict[str, Any]:
        return {"predicted": float(output[0] * self.fields_[-1].scale + self.fields_[-1].mean), "probability": None}
