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
    hold_out,
    label_facts,
    labels_of,
    read_fitted,
    seed_of,
    seeded,
    write_fitted,
)
from keyquery.estimators.fitting import TIE, Labelled, class_loss, epochs_of, judged
from keyquery.estimators.importance import Importance, occlude
from keyquery.estimators.network import KINDS, SeriesNetwork
from keyquery.estimators.sequences import Padded, padded, series_of, statistics
from keyquery.forms.checks import check_choice, check_count
from keyquery.progress import bar, silent
from keyquery.reading import provenance
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
    history_: list[dict[str, float]]  # one row an epoch: loss and, with a holdout, its errors

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
        device: str = "auto",
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
        series = series_of(X)
        labels = labels_of(type(self).__name__, _labels(X, y), len(series))
        classes, numbers = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y holds only one class, {classes[0]!r}: a classifier needs two or more")
        seed = seed_of(self.random_state)
        mean, scale = statistics(series)
        samples = Labelled(padded(series, mean, scale, device), torch.from_numpy(numbers).to(device))
        with seeded(seed, device):
            network = self._network(len(mean), len(classes)).to(device)
            history = self._train(network, samples, seed)
        self.network_, self.classes_, self.mean_, self.scale_ = network, classes, mean, scale
        self.history_ = history
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
        found = [
            occlude(self._log_probabilities, Padded(*(part[i] for part in data)), stretch) for i in range(len(series))
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
            provenance=provenance(estimator=repr(self)),
        )

    def plot(self, x: Any, stretch: int | None = None, **options: Any) -> Any:
        """A matplotlib figure of one series (length, dims) or (length,) and the stretches that mattered."""
        return self.importance([x], stretch).plot(**options)

    def save(self, path: str | Path) -> None:
        """Write everything that predicting needs into one safetensors file."""
        self._check_fitted()
        state = self.random_state if isinstance(self.random_state, int) else None  # a generator is no plain fact
        facts = {"params": {**self.get_params(), "random_state": state}, "classes": label_facts(self.classes_)}
        tensors = {f"network.{name}": tensor for name, tensor in self.network_.state_dict().items()}
        tensors |= {"mean": torch.from_numpy(self.mean_), "scale": torch.from_numpy(self.scale_)}
        write_fitted(path, type(self).__name__, {**facts, "history": self.history_}, tensors)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> SeriesClassifier:
        """The classifier of a file that `save` wrote, to run on `device`."""
        facts, tensors = read_fitted(path, cls.__name__)
        try:
            made = cls(**{**facts["params"], "device": device})
            made._check()
            classes, mean, scale = classes_of(facts["classes"]), tensors.pop("mean"), tensors.pop("scale")
            network = made._network(len(mean), len(classes))
            network.load_state_dict({name.removeprefix("network."): tensor for name, tensor in tensors.items()})
            made.history_ = list(facts["history"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path} is no whole {cls.__name__}: {str(error).splitlines()[0]}") from None
        made.network_, made.classes_ = network.eval(), classes
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

        def validate(model: Any) -> float:
            assert checked is not None
            errors, loss = judged(model, checked, 4 * self.batch_size)
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
        watch = bar if self.verbose else silent
        log = train(network, draw, class_loss, recipe, validate=validate if checked else None, progress=watch)
        return [{"epoch": int(row.pop("step")) // every, **row} for row in log.rows]

    def _padded(self, X: Any) -> Padded:
        self._check_fitted()
        series = series_of(X)
        if (dims := series[0].shape[1]) != len(self.mean_):
            name = type(self).__name__
            raise ValueError(f"X has {dims} dims, but this {name} was fitted on series of {len(self.mean_)}")
        return padded(series, self.mean_, self.scale_, pick_device(self.device))

    @torch.no_grad()
    def _log_probabilities(self, data: Padded) -> Tensor:
        network = self.network_.to(data.values.device).eval()
        logits = torch.cat([network(*batch) for batch in data.batches(4 * self.batch_size)])
        return logits.double().log_softmax(-1)


def _labels(X: Any, y: Any) -> Any:
    return X.labels if y is None and isinstance(X, Series) else y


def _plain(label: Any) -> str | int | float | bool:
    """A label as JSON holds it."""
    found = label.item() if isinstance(label, np.generic) else label
    return found if isinstance(found, (str, int, float, bool)) else str(found)
