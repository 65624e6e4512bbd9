"""Base class of the classifiers of time series: validated input, fitting, prediction, importance and files."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor

from keyquery.learn.base import Classifier, SavedEstimator, check_is_fitted, seed_of
from keyquery.learn.data.series import Series
from keyquery.learn.inputs.sequences import (
    Padded,
    axes_of,
    columns_of,
    padded,
    restored_statistics,
    series_of,
    statistics,
)
from keyquery.learn.inputs.targets import classes_of, label_facts
from keyquery.learn.series.importance import Importance, occlude
from keyquery.support.checks import check_count, check_number
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress, bars, silent

Fitted = TypeVar("Fitted", bound="SeriesEstimator")


class Labelled(NamedTuple):
    """Series, their class indices and weights."""

    data: Padded
    target: Int[Tensor, " batch"]
    weight: Float[Tensor, " batch"]

    def take(self, index: Any) -> Labelled:
        """A subset."""
        chosen = torch.as_tensor(index, device=self.target.device)
        return Labelled(self.data.take(chosen), self.target[chosen], self.weight[chosen])


class SeriesEstimator(Classifier, SavedEstimator):
    """A classifier whose samples are series of any length."""

    classes_: Shaped[np.ndarray, " classes"]
    mean_: Float64[np.ndarray, " dims"]
    scale_: Float64[np.ndarray, " dims"]
    columns_: list[str] | None  # names of the dimensions, if all series are data frames
    temperature_: float  # by which logits are divided
    axis: int
    class_weight: Any
    random_state: Any
    device: Any
    verbose: bool

    def fit(self: Fitted, X: Any, y: Any = None, sample_weight: Any = None) -> Fitted:
        """Fit to series X, labels y (n,) and weights (n,); series of weight 0 are left out.

        X is an array (n, length, dims) or (n, length), a list of arrays (length, dims), or a `kq.data.Series`, whose
        labels are the default.
        """
        self._check()
        device = pick_device(self.device)
        series = self._prepared(series_of(X, self.axis))
        self._warn_of_axis(X, series)
        kept, classes, numbers, weights = self._labelled(X, y, len(series), sample_weight)
        series = [series[index] for index in np.flatnonzero(kept)]
        mean, scale = statistics(series)
        target, weight = (torch.from_numpy(part).to(device) for part in (numbers, weights))
        samples = Labelled(padded(series, mean, scale, device), target, weight)
        self._learn(samples, len(classes), seed_of(self.random_state))
        self.classes_, self.mean_, self.scale_ = classes, mean, scale
        self.columns_, self.params_ = columns_of(X), self._plain_params()
        return self

    def _logits(self, X: Any) -> Float64[Tensor, "n classes"]:
        data = self._padded(X)
        with bars(self.verbose) as progress:
            return self._log_probabilities(data, progress).cpu()

    def importance(self, X: Any, stretch: int | None = None) -> Importance:
        """Occlusion importance: which segments of each series support the predicted class.

        A window of `stretch` time steps slides over the series by half its length and is replaced by the mean of the
        training data; relevance is the mean drop of the predicted class's log-odds over the windows that cover a step.
        """
        check_count("stretch", stretch, least=1, optional=True)
        data, rows, classes = self._padded(X), [], label_facts(self.classes_)["labels"]
        with bars(self.verbose) as progress:
            for number, values in enumerate(series_of(X, self.axis)):
                alone = Padded(*(part[number] for part in data))
                relevance, width, chosen, probability = occlude(self._log_probabilities, alone, stretch, progress)
                rows.append(
                    {
                        "values": [[None if value != value else value for value in row] for row in values.tolist()],
                        "relevance": (relevance + [0.0] * len(values))[: len(values)],
                        "stretch": width,
                        "predicted": classes[chosen],
                        "probability": probability,
                    }
                )
        return Importance(classes=classes, series=rows, columns=self.columns_, provenance=self._provenance())

    def plot(self, x: Any, stretch: int | None = None) -> Any:
        """A figure of one series, (length, dims) or (length,), with its important segments; see `importance`."""
        if isinstance(x, Series) or axes_of(x) > 2:
            raise ValueError("plot takes one series, (length, dims) or (length,); select one, such as X[0]")
        return self.importance([x], stretch).plot()

    @abstractmethod
    def _learn(self, samples: Labelled, classes: int, seed: int) -> None:
        """Set the network and what else the classifier learns, if nothing fails."""

    @abstractmethod
    def _log_probabilities(self, data: Padded, progress: Progress = silent) -> Float64[Tensor, "batch classes"]:
        """Log-probabilities of standardised series."""

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        facts = {"classes": label_facts(self.classes_), "columns": self.columns_, "temperature": self.temperature_}
        return facts, {"mean": torch.from_numpy(self.mean_), "scale": torch.from_numpy(self.scale_)}

    def _restore_common(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """What both classifiers save."""
        self.classes_, self.columns_ = classes_of(facts["classes"]), facts.get("columns")
        self.mean_, self.scale_ = restored_statistics(tensors, "dims")
        check_number("temperature", facts["temperature"])
        if not facts["temperature"] > 0:
            raise ValueError(f"temperature must be above 0, got {facts['temperature']}")
        self.temperature_ = float(facts["temperature"])

    def _prepared(self, series: list[np.ndarray]) -> list[np.ndarray]:
        """What is done to series before they are standardised."""
        return series

    def _padded(self, X: Any) -> Padded:
        check_is_fitted(self)
        series, columns = self._prepared(series_of(X, self.axis)), columns_of(X)
        name, dims = type(self).__name__, len(self.mean_)
        if (width := series[0].shape[1]) != dims:
            single = width == 1 and all(len(values) == dims for values in series)
            hint = ": pass a single series as [X]" if single else ""
            raise ValueError(f"X has {width} dims, but this {name} was fitted on series of {dims}{hint}")
        if None not in (columns, self.columns_) and columns != self.columns_:
            raise ValueError(f"X has columns {columns}, but this {name} was fitted on {self.columns_}")
        return padded(series, self.mean_, self.scale_, pick_device(self.device))

    def _warn_of_axis(self, X: Any, series: list[np.ndarray]) -> None:
        """Channels first, as in aeon, are easily taken for time steps."""
        length, dims = series[0].shape
        if self.axis == 1 and not isinstance(X, Series) and length < dims and len(set(map(len, series))) == 1:
            warnings.warn(
                f"X is read as series of {length} steps and {dims} dims; if it is (n, dims, length), set axis=2",
                UserWarning,
                stacklevel=3,
            )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = tags.input_tags.allow_nan = True
        return tags
