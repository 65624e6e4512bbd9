"""Base class of the classifiers of time series: validated input, prediction and importance."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

import numpy as np
from jaxtyping import Float64, Shaped
from torch import Tensor

from keyquery.learn.base import Classifier, SavedEstimator, check_is_fitted
from keyquery.learn.data.series import Series
from keyquery.learn.inputs.sequences import Padded, axes_of, columns_of, padded, series_of
from keyquery.learn.inputs.tables import target_of
from keyquery.learn.inputs.targets import labels_of, weights_of
from keyquery.learn.series.importance import Importance, occlude
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress, bars, silent


class SeriesEstimator(Classifier, SavedEstimator):
    """A classifier whose samples are series of any length."""

    classes_: Shaped[np.ndarray, " classes"]
    mean_: Float64[np.ndarray, " dims"]
    scale_: Float64[np.ndarray, " dims"]
    columns_: list[str] | None  # names of the dimensions, if all series are data frames
    axis: int
    class_weight: Any
    device: Any
    verbose: bool

    def predict_proba(self, X: Any) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (n, classes), in the order of `classes_`."""
        data = self._padded(X)
        with bars(self.verbose) as progress:
            return self._log_probabilities(data, progress).exp().cpu().numpy()

    def importance(self, X: Any, stretch: int | None = None) -> Importance:
        """Occlusion importance: which segments of each series support the predicted class.

        A window of `stretch` time steps slides over the series by half its length and is replaced by the mean of the
        training data. The relevance of a time step is the mean drop of the log-odds log p/(1 − p) of the predicted
        class over the windows that cover it: positive if it supports the class.
        """
        check_count("stretch", stretch, least=1, optional=True)
        data, series = self._padded(X), series_of(X, self.axis)
        with bars(self.verbose) as progress:
            occluded = [
                occlude(self._log_probabilities, Padded(*(part[i] for part in data)), stretch, progress)
                for i in range(len(series))
            ]
        return Importance(
            classes=[plain_label(label) for label in self.classes_],
            series=[
                {
                    "values": [[None if value != value else value for value in row] for row in values.tolist()],
                    "relevance": (relevance + [0.0] * len(values))[: len(values)],
                    "stretch": width,
                    "predicted": plain_label(self.classes_[number]),
                    "probability": probability,
                }
                for values, (relevance, width, number, probability) in zip(series, occluded, strict=True)
            ],
            columns=self.columns_,
            provenance=provenance(
                tensors=digests(self.network_.state_dict()), estimator=repr(type(self)(**self.params_))
            ),
        )

    def plot(self, x: Any, stretch: int | None = None) -> Any:
        """Plot one series with its important segments.

        Parameters
        ----------
        x
            One series, (length, dims) or (length,).
        stretch
            Window length in time steps. Default: a sixteenth of the series.

        Returns
        -------
        matplotlib.figure.Figure
        """
        if isinstance(x, Series) or axes_of(x) > 2:
            raise ValueError("plot takes one series, (length, dims) or (length,); select one, such as X[0]")
        return self.importance([x], stretch).plot()

    @abstractmethod
    def _log_probabilities(self, data: Padded, progress: Progress = silent) -> Float64[Tensor, "batch classes"]:
        """Log-probabilities of standardised series."""

    def _samples(self, X: Any, y: Any, sample_weight: Any) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """Validated series (length, dims), labels and weights; samples of weight 0 are left out."""
        series = self._prepared(series_of(X, self.axis))
        self._warn_of_axis(X, series)
        labels = labels_of(type(self).__name__, target_of(X, y), len(series))
        weights = weights_of(type(self).__name__, labels, sample_weight, self.class_weight)
        kept = np.flatnonzero(weights)
        if len(classes := np.unique(labels[kept])) < 2:
            only = plain_label(classes[0])
            raise ValueError(f"y holds only one class, {only!r}: a classifier needs two or more")
        return [series[index] for index in kept], labels[kept], weights[kept]

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
        if self.axis == 1 and not isinstance(X, Series) and length < dims and len({len(one) for one in series}) == 1:
            warnings.warn(
                f"X is read as series of {length} steps and {dims} dims; if it is (n, dims, length), set axis=2",
                UserWarning,
                stacklevel=4,
            )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = tags.input_tags.allow_nan = True
        return tags


def plain_label(label: Any) -> str | int | float | bool:
    """A label as JSON."""
    value = label.item() if isinstance(label, np.generic) else label
    return value if isinstance(value, (str, int, float, bool)) else str(value)
