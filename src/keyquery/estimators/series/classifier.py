"""SeriesClassifier: time series in, classes out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from keyquery.capture.load import pick_device
from keyquery.data.series import Series
from keyquery.estimators.base import (
    Estimator,
    check_sizes,
    classes_of,
    filled,
    hold_out,
    label_facts,
    labels_of,
    read_fitted,
    seed_of,
    seeded,
    write_fitted,
)
from keyquery.estimators.inputs.sequences import Padded, axes_of, columns_of, padded, series_of, statistics
from keyquery.estimators.series.importance import Importance, occlude
from keyquery.estimators.series.network import KINDS, SeriesNetwork
from keyquery.estimators.series.training import TIE, Labelled, class_loss, epochs_of, judged
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import bars
from keyquery.training import Recipe, train

RANK = 20  # of primal layers, where heads are as wide


class SeriesClassifier(Estimator):
    """Time series to classes, by a small transformer: fit, predict and score of scikit-learn, which need not be there.

    Series are arrays (length, dims) in a list, one array (n, length, dims) or (n, length) with NaN after the end of
    shorter ones, or what `kq.data.load_ts` gives. A token is real where any of its dims has a value; the others are
    masked. A value that is missing from a real token counts as the mean of its dim over the training data.

    `attention` is "primal" (every layer), "primal+" (the last one) or a kernel of `kq.Attention`; `rank` and `eta` are
    those of `kq.PrimalAttention`, `rank=None` the smaller of 20 and a head's width. `holdout` of each class is kept
    from training; the weights of the epoch that errs least on it are taken, and after `patience` epochs without a
    better one training stops. With `holdout=0` it goes through all `epochs`.

    >>> _ = torch.manual_seed(0)
    >>> noise, ramp = torch.randn(2, 20, 30), torch.linspace(-1, 1, 30)
    >>> X, y = torch.cat((noise[0] + ramp, noise[1] - ramp)), ["up"] * 20 + ["down"] * 20
    >>> model = kq.SeriesClassifier(width=16, heads=2, epochs=20, lr=5e-3, random_state=0)
    >>> model.fit(X, y).score(X, y) > 0.9
    True
    >>> model.predict([3 * ramp, -3 * ramp[::3]])
    array(['up', 'down'], dtype='<U4')
    """

    _estimator_type = "classifier"
    network_: SeriesNetwork
    classes_: Shaped[np.ndarray, " classes"]
    mean_: Float64[np.ndarray, " dims"]
    scale_: Float64[np.ndarray, " dims"]
    history_: list[dict[str, float]]  # one row an epoch: loss and, with a holdout, its share of errors and its loss
    columns_: list[str] | None  # names of dims, where all series are data frames

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
        random_state: Any = None,
        device: str | torch.device = "auto",
        verbose: bool = False,
    ) -> None:
        self.attention, self.width, self.depth, self.heads = attention, width, depth, heads
        self.rank, self.eta, self.dropout = rank, eta, dropout
        self.epochs, self.batch_size, self.lr = epochs, batch_size, lr
        self.holdout, self.patience = holdout, patience
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def fit(self, X: Any, y: Any = None) -> SeriesClassifier:
        """Learn from series and one label for each; y may be left out where X is a `Series` with labels."""
        self._check()
        device = pick_device(self.device)
        series, columns = series_of(X), columns_of(X)
        labels = labels_of(type(self).__name__, _labels(X, y), len(series))
        classes, numbers = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y holds only one class, {_plain(classes[0])!r}: a classifier needs two or more")
        seed = seed_of(self.random_state)
        mean, scale = statistics(series)
        samples = Labelled(padded(series, mean, scale, device), torch.from_numpy(numbers).to(device))
        with seeded(seed, device):
            network = self._network(len(mean), len(classes)).to(device)
            history = self._train(network, samples, seed)
        self.network_, self.classes_, self.mean_, self.scale_ = network, classes, mean, scale
        self.history_, self.columns_, self.params_ = history, columns, self._plain_params()
        return self

    def predict_proba(self, X: Any) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (n, classes), in the order of `classes_`."""
        return self._log_probabilities(self._padded(X)).exp().cpu().numpy()

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """The likeliest class of each series."""
        data = self._padded(X)  # first: what is not fitted has no classes
        return self.classes_[self._log_probabilities(data).argmax(1).cpu().numpy()]

    def score(self, X: Any, y: Any = None) -> float:
        """The share of series whose class is predicted; y may be left out where X is a `Series` with labels."""
        found = self.predict(X)
        return float(np.mean(found == labels_of(type(self).__name__, _labels(X, y), len(found))))

    def importance(self, X: Any, stretch: int | None = None) -> Importance:
        """Which stretches of each series the predicted class rests on.

        A window of `stretch` tokens (None: a sixteenth of the series) is moved over the series by half its length, and
        what it covers is replaced by the mean of the training data. A token's figure is by how much the log-odds of
        the class, log p/(1 − p), then fall, the mean over the windows that cover it: above 0 it speaks for the class,
        below 0 against it.
        """
        check_count("stretch", stretch, least=1, optional=True)
        data, series = self._padded(X), series_of(X)
        with bars(self.verbose) as progress:
            found = [
                occlude(self._log_probabilities, Padded(*(part[i] for part in data)), stretch, progress)
                for i in range(len(series))
            ]
        return Importance(
            classes=[_plain(label) for label in self.classes_],
            series=[
                {
                    "values": [[None if value != value else value for value in row] for row in one.tolist()],
                    "relevance": relevance[: len(one)],
                    "stretch": width,
                    "predicted": _plain(self.classes_[number]),
                    "probability": probability,
                }
                for one, (relevance, width, number, probability) in zip(series, found, strict=True)
            ],
            columns=self.columns_,
            provenance=provenance(
                tensors=digests(self.network_.state_dict()), estimator=repr(type(self)(**self.params_))
            ),
        )

    def plot(self, x: Any, stretch: int | None = None) -> Any:
        """A matplotlib figure of one series (length, dims) or (length,) and the stretches that mattered."""
        if isinstance(x, Series) or axes_of(x) > 2:
            raise ValueError("plot takes one series, (length, dims) or (length,): of several, give one, such as X[0]")
        return self.importance([x], stretch).plot()

    def save(self, path: str | Path) -> None:
        """Write everything that predicting needs, and the parameters of the fit, into one safetensors file."""
        self._check_fitted()
        facts = {"params": self.params_, "classes": label_facts(self.classes_), "columns": self.columns_}
        tensors = {f"network.{name}": tensor for name, tensor in self.network_.state_dict().items()}
        tensors |= {"mean": torch.from_numpy(self.mean_), "scale": torch.from_numpy(self.scale_)}
        write_fitted(path, type(self).__name__, {**facts, "history": self.history_}, tensors)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "auto") -> SeriesClassifier:
        """The classifier of a file that `save` wrote, to run on `device`."""
        pick_device(device)
        facts, tensors = read_fitted(path, cls.__name__)
        try:
            made = cls(**{**facts["params"], "device": device})
            made._check()
            made.classes_, made.history_ = classes_of(facts["classes"]), list(facts["history"])
            made.columns_, made.params_ = facts.get("columns"), facts["params"]
            mean, scale = tensors.pop("mean"), tensors.pop("scale")
            weights = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
            if not all(tensor.isfinite().all() for tensor in (mean, scale)):
                raise ValueError("it holds NaN or infinity")
            if mean.ndim != 1 or mean.shape != scale.shape or not (scale > 0).all():
                raise ValueError("mean and scale must be (dims,), and scale above 0")
            made.network_ = filled(lambda: made._network(len(mean), len(made.classes_)), weights, made.depth)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is no whole {cls.__name__}: {str(error).splitlines()[0]}") from None
        made.mean_, made.scale_ = mean.double().numpy(), scale.double().numpy()
        return made

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = tags.input_tags.allow_nan = True
        return tags

    def _check(self) -> None:
        check_choice("attention", self.attention, KINDS)
        sizes = ("width", "depth", "heads", "epochs", "batch_size", "patience")
        check_sizes(self, sizes, eta=math.inf, lr=math.inf, dropout=1, holdout=1)
        check_count("rank", self.rank, least=1, optional=True)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")

    def _network(self, dims: int, classes: int) -> SeriesNetwork:
        rank = min(RANK, self.width // self.heads) if self.rank is None else self.rank
        shape = (self.width, self.depth, self.heads)
        return SeriesNetwork(dims, classes, *shape, self.attention, rank, self.eta, self.dropout)

    def _train(self, network: SeriesNetwork, samples: Labelled, seed: int) -> list[dict[str, float]]:
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
            except FloatingPointError as error:  # the loop names more than a classifier can be told
                raise FloatingPointError(f"{str(error).split(':')[0]}: a smaller lr may help") from None
        rows = [{"epoch": int(row["step"]) // every, "loss": row["loss"]} for row in log.rows]
        return [row | check for row, check in zip(rows, checks, strict=True)] if checked else rows

    def _padded(self, X: Any) -> Padded:
        self._check_fitted()
        series, columns = series_of(X), columns_of(X)
        name, dims = type(self).__name__, len(self.mean_)
        if (given := series[0].shape[1]) != dims:
            alone = given == 1 and all(len(one) == dims for one in series)
            hint = ": one series alone is [X]" if alone else ""
            raise ValueError(f"X has {given} dims, but this {name} was fitted on series of {dims}{hint}")
        if None not in (columns, self.columns_) and columns != self.columns_:
            raise ValueError(f"X has columns {columns}, but this {name} was fitted on {self.columns_}")
        return padded(series, self.mean_, self.scale_, pick_device(self.device))

    @torch.no_grad()
    def _log_probabilities(self, data: Padded) -> Float64[Tensor, "batch classes"]:
        network = self.network_.to(data.values.device).eval()
        groups = data.alike(4 * self.batch_size)
        logits = torch.cat([network(*data.take(some)) for some in groups])[torch.cat(groups).argsort()]
        if not logits.isfinite().all():
            most = float(data.values.abs().max())
            raise ValueError(f"X holds values too large: up to {most:.0e} standard deviations of the training data")
        return logits.double().log_softmax(-1)


def _labels(X: Any, y: Any) -> Any:
    return X.labels if y is None and isinstance(X, Series) else y


def _plain(label: Any) -> str | int | float | bool:
    """A label as JSON holds it."""
    found = label.item() if isinstance(label, np.generic) else label
    return found if isinstance(found, (str, int, float, bool)) else str(found)
