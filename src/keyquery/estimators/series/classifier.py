"""SeriesClassifier: time-series classification by a small transformer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from keyquery.capture.load import pick_device
from keyquery.data.series import Series
from keyquery.estimators.base import Classifier, SavedEstimator, check_is_fitted, check_sizes, hold_out, seed_of, seeded
from keyquery.estimators.inputs.sequences import (
    Padded,
    axes_of,
    columns_of,
    padded,
    restored_statistics,
    series_of,
    statistics,
)
from keyquery.estimators.inputs.tables import target_of
from keyquery.estimators.inputs.targets import classes_of, label_facts, labels_of
from keyquery.estimators.series.importance import Importance, occlude
from keyquery.estimators.series.network import KINDS, SeriesNetwork
from keyquery.estimators.series.training import TIE, WARMEST, Labelled, class_loss, epochs_of, judged, temperature_of
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.progress import bars
from keyquery.training import Recipe, train

RANK = 20  # of primal layers, if heads are at least this wide


class SeriesClassifier(Classifier, SavedEstimator):
    """Time-series classifier: a small transformer with the scikit-learn estimator interface.

    Series are a list of arrays (length, dims), one array (n, length, dims) or (n, length) padded with NaN, or the
    result of `kq.data.load_ts`. Time steps at which every dimension is NaN are masked. Other missing values are
    imputed by the mean of their dimension over the training data. Probabilities are softened by a temperature, if the
    validation split shows them to be too sure.

    Parameters
    ----------
    attention
        "primal" (every layer), "primal+" (the last layer), or a kernel of `kq.Attention`. Default: "primal+".
    width, depth, heads
        Size of the transformer. Default: 64, 2, 4.
    rank, eta
        Options of `kq.PrimalAttention`. Default: the smaller of 20 and the head width; 0.1.
    dropout
        Default: 0.1.
    epochs, batch_size, lr
        Default: 60, 16, 1e-3.
    holdout
        Share of each class used as the validation split; the weights of the best epoch are kept. With 0, all epochs
        are run. Default: 0.2.
    patience
        Epochs without improvement on the validation split before training stops. Default: 20.
    axis
        The axis of time: 1 for arrays (n, length, dims) and lists of (length, dims); 2 for (n, dims, length) and lists
        of (dims, length), as in aeon. Default: 1.
    random_state
        Seed: None, an integer or a numpy generator. Default: None.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress bars. Default: False.

    See Also
    --------
    kq.data.load_ts : reads UEA and UCR archives.
    kq.PrimalAttention : the layer.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> noise, ramp = torch.randn(2, 20, 30), torch.linspace(-1, 1, 30)
    >>> X, y = torch.cat((noise[0] + ramp, noise[1] - ramp)), ["up"] * 20 + ["down"] * 20
    >>> model = kq.SeriesClassifier(width=16, heads=2, epochs=20, lr=5e-3, random_state=0)
    >>> model.fit(X, y).score(X, y) > 0.9
    True
    >>> model.predict([3 * ramp, -3 * ramp[::3]])
    array(['up', 'down'], dtype='<U4')
    """

    network_: SeriesNetwork
    classes_: Shaped[np.ndarray, " classes"]
    mean_: Float64[np.ndarray, " dims"]
    scale_: Float64[np.ndarray, " dims"]
    history_: list[dict[str, float]]  # one row per epoch: training loss, validation error and loss
    temperature_: float  # by which logits are divided
    columns_: list[str] | None  # names of the dimensions, if all series are data frames

    def __init__(
        self,
        attention: str = "primal+",
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        rank: int | None = None,
        eta: float = 0.1,
        dropout: float = 0.1,
        epochs: int = 60,
        batch_size: int = 16,
        lr: float = 1e-3,
        holdout: float = 0.2,
        patience: int = 20,
        axis: int = 1,
        random_state: Any = None,
        device: str | torch.device = "auto",
        verbose: bool = False,
    ) -> None:
        self.attention, self.width, self.depth, self.heads = attention, width, depth, heads
        self.rank, self.eta, self.dropout = rank, eta, dropout
        self.epochs, self.batch_size, self.lr = epochs, batch_size, lr
        self.holdout, self.patience, self.axis = holdout, patience, axis
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def fit(self, X: Any, y: Any = None) -> SeriesClassifier:
        """Fit to series X and labels y (n,). Default y: the labels of X, if X is a `kq.data.Series`.

        Parameters
        ----------
        X
            Series: an array (n, length, dims) or (n, length), a list of arrays (length, dims), or a `kq.data.Series`.
        y
            Labels (n,). Default: those of X, if X is a `kq.data.Series`.

        Returns
        -------
        SeriesClassifier
            The fitted estimator.
        """
        self._check()
        device = pick_device(self.device)
        series, columns = series_of(X, self.axis), columns_of(X)
        self._warn_of_axis(X)
        labels = labels_of(type(self).__name__, target_of(X, y), len(series))
        classes, numbers = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y holds only one class, {_plain(classes[0])!r}: a classifier needs two or more")
        seed = seed_of(self.random_state)
        mean, scale = statistics(series)
        samples = Labelled(padded(series, mean, scale, device), torch.from_numpy(numbers).to(device))
        with seeded(seed, device):
            network = self._network(len(mean), len(classes)).to(device)
            history, temperature = self._train(network, samples, seed)
        self.network_, self.classes_, self.mean_, self.scale_ = network, classes, mean, scale
        self.history_, self.columns_, self.params_ = history, columns, self._plain_params()
        self.temperature_ = temperature
        return self

    def predict_proba(self, X: Any) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (n, classes), in the order of `classes_`.

        Parameters
        ----------
        X
            Series: an array (n, length, dims) or (n, length), a list of arrays (length, dims), or a `kq.data.Series`.

        Returns
        -------
        ndarray
            Probabilities (n, classes), in the order of `classes_`.
        """
        return self._log_probabilities(self._padded(X)).exp().cpu().numpy()

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """Predicted class of each series (n,).

        Parameters
        ----------
        X
            Series: an array (n, length, dims) or (n, length), a list of arrays (length, dims), or a `kq.data.Series`.

        Returns
        -------
        ndarray
            Predicted class of each series (n,).
        """
        data = self._padded(X)  # raises if not fitted
        return self.classes_[self._log_probabilities(data).argmax(1).cpu().numpy()]

    def importance(self, X: Any, stretch: int | None = None) -> Importance:
        """Occlusion importance: which segments of each series support the predicted class.

        A window of `stretch` time steps slides over the series by half its length and is replaced by the mean of the
        training data. The relevance of a time step is the mean drop of the log-odds log p/(1 − p) of the predicted
        class over the windows that cover it: positive if it supports the class.

        Parameters
        ----------
        X
            Series, as in `fit`.
        stretch
            Window length in time steps. Default: a sixteenth of the series.

        Returns
        -------
        Importance
            A Reading with one row per series; `.plot()` draws it.
        """
        check_count("stretch", stretch, least=1, optional=True)
        data, series = self._padded(X), series_of(X, self.axis)
        with bars(self.verbose) as progress:
            occluded = [
                occlude(self._log_probabilities, Padded(*(part[i] for part in data)), stretch, progress)
                for i in range(len(series))
            ]
        return Importance(
            classes=[_plain(label) for label in self.classes_],
            series=[
                {
                    "values": [[None if value != value else value for value in row] for row in values.tolist()],
                    "relevance": relevance[: len(values)],
                    "stretch": width,
                    "predicted": _plain(self.classes_[number]),
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
        """Plot one series (length, dims) or (length,) with its important segments, as a matplotlib figure.

        Parameters
        ----------
        x
            One series (length, dims) or (length,).
        stretch
            Length of the occluded window, in time steps. Default: 1/16 of the series.

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        if isinstance(x, Series) or axes_of(x) > 2:
            raise ValueError("plot takes one series, (length, dims) or (length,); select one, such as X[0]")
        return self.importance([x], stretch).plot()

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        facts = {"classes": label_facts(self.classes_), "columns": self.columns_, "temperature": self.temperature_}
        return facts, {"mean": torch.from_numpy(self.mean_), "scale": torch.from_numpy(self.scale_)}

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], SeriesNetwork], int]:
        self.classes_, self.columns_ = classes_of(facts["classes"]), facts.get("columns")
        self.mean_, self.scale_ = restored_statistics(tensors, "dims")
        check_number("temperature", temperature := facts.get("temperature", 1.0))
        if not 1 <= temperature <= WARMEST:
            raise ValueError(f"temperature must be from 1 to {WARMEST:g}, got {temperature}")
        self.temperature_ = float(temperature)
        return lambda: self._network(len(self.mean_), len(self.classes_)), self.depth

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = tags.input_tags.allow_nan = True
        return tags

    def _check(self) -> None:
        check_choice("attention", self.attention, KINDS)
        sizes = ("width", "depth", "heads", "epochs", "batch_size", "patience")
        check_sizes(self, sizes, eta=math.inf, lr=math.inf, dropout=1, holdout=1)
        check_count("rank", self.rank, least=1, optional=True)
        check_count("axis", self.axis, least=1, most=2)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")

    def _network(self, dims: int, classes: int) -> SeriesNetwork:
        rank = min(RANK, self.width // self.heads) if self.rank is None else self.rank
        shape = (self.width, self.depth, self.heads)
        return SeriesNetwork(dims, classes, *shape, self.attention, rank, self.eta, self.dropout)

    def _warn_of_axis(self, X: Any) -> None:
        """Channels first are easily taken for time steps."""
        shape = np.shape(X) if hasattr(X, "ndim") and X.ndim == 3 else ()
        if self.axis == 1 and shape and shape[1] < shape[2]:
            warnings.warn(
                f"X is read as series of {shape[1]} steps and {shape[2]} dims; if it is (n, dims, length), set axis=2",
                UserWarning,
                stacklevel=3,
            )

    def _train(self, network: SeriesNetwork, samples: Labelled, seed: int) -> tuple[list[dict[str, float]], float]:
        """The history, and the temperature of the probabilities."""
        learned, held = hold_out(samples.target.cpu().numpy(), self.holdout, seed)
        draw, every = epochs_of(samples.take(learned).take, len(learned), self.batch_size, seed)
        checked = samples.take(held) if len(held) else None
        checks: list[dict[str, float]] = []

        def validate(model: Any) -> float:
            assert checked is not None
            errors, loss = judged(model, checked, 4 * self.batch_size)
            checks.append({"held_out_error": errors, "held_out_loss": loss})
            return errors + TIE * loss

        recipe = Recipe(
            steps=self.epochs * every,
            lr=self.lr,
            warmup=min(2 * every, self.epochs * every // 4),
            clip=4.0,
            seed=seed,
            check_every=every,
            patience=self.patience,
        )
        with bars(self.verbose) as progress:
            try:
                log = train(
                    network, draw, class_loss, recipe, validate=validate if checked else None, progress=progress
                )
            except FloatingPointError as error:  # the loop suggests options that this estimator does not have
                raise FloatingPointError(f"{str(error).split(':')[0]}: a smaller lr may help") from None
        rows = [{"epoch": int(row["step"]) // every, "loss": row["loss"]} for row in log.rows]
        if checked is None:
            return rows, 1.0
        temperature = temperature_of(network, checked, 4 * self.batch_size)
        return [row | check for row, check in zip(rows, checks, strict=True)], temperature

    def _padded(self, X: Any) -> Padded:
        check_is_fitted(self)
        series, columns = series_of(X, self.axis), columns_of(X)
        name, dims = type(self).__name__, len(self.mean_)
        if (width := series[0].shape[1]) != dims:
            single = width == 1 and all(len(values) == dims for values in series)
            hint = ": pass a single series as [X]" if single else ""
            raise ValueError(f"X has {width} dims, but this {name} was fitted on series of {dims}{hint}")
        if None not in (columns, self.columns_) and columns != self.columns_:
            raise ValueError(f"X has columns {columns}, but this {name} was fitted on {self.columns_}")
        return padded(series, self.mean_, self.scale_, pick_device(self.device))

    @torch.no_grad()
    def _log_probabilities(self, data: Padded) -> Float64[Tensor, "batch classes"]:
        network = self.network_.to(data.values.device).eval()
        groups = data.alike(4 * self.batch_size)
        logits = torch.cat([network(*data.take(group)) for group in groups])[torch.cat(groups).argsort()]
        if not logits.isfinite().all():
            most = float(data.values.abs().max())
            raise ValueError(f"X holds values too large: up to {most:.0e} standard deviations of the training data")
        return (logits.double() / self.temperature_).log_softmax(-1)


def _plain(label: Any) -> str | int | float | bool:
    """A label as JSON."""
    value = label.item() if isinstance(label, np.generic) else label
    return value if isinstance(value, (str, int, float, bool)) else str(value)
