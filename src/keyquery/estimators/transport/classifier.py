"""TransportClassifier: classes by a map that is learned from optimal transport."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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
from keyquery.estimators.inputs.points import Points, points_of
from keyquery.estimators.inputs.sequences import statistics
from keyquery.estimators.inputs.tables import check_features
from keyquery.estimators.npt.base import target_of
from keyquery.estimators.series.training import epochs_of
from keyquery.estimators.transport.alignment import (
    GEOMETRIES,
    MATCHES,
    Aligned,
    Mapper,
    align,
    centres,
    learned_loss,
    map_loss,
    room,
)
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import Progress, bars
from keyquery.training import Recipe, train

HOLDOUT = 0.2
PATIENCE = 20  # epochs without a better one
LR = 1e-2
STEPS = 10  # an epoch
CHUNK = 2**16  # points that are mapped at a time


class TransportClassifier(Estimator):
    """Classes by optimal transport: every class goes to a Gaussian of its own, and a small network learns the way.

    Each class c has a target N(μ_c, I). The standardised points of a class are matched with as many draws of its
    target, a multilayer perceptron f learns the map (squared error, Adam), and the class of a point is told by
    softmax_c(−‖f(x) − μ_c‖). X is a table (n, features), or sequences (n, T, features), or a list of them of any
    lengths: then every step is a point, and the scores of a sequence's steps are multiplied.

    `geometry` says where the μ_c are: on a "circle" of radius 3k for k classes, at the corners of a "simplex", or
    "learned" with the map, from a simplex on, by the cross-entropy of the softmax that predicts. On a circle of four
    or more classes the nearest centre is not always the likeliest class: there take a simplex. A circle has two
    dimensions and a simplex k − 1; where X has fewer features, the map has more outputs than inputs, and for the
    matching features of 0 are added.

    `match` is "ot", or one of two controls: "random" pairs of the same class, and "mean", where every point goes to
    μ_c itself. A fifth of each class is kept from training; the weights of the epoch that errs least on it are taken,
    and after 20 epochs without a better one training stops.

    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> y = np.where(np.hypot(*X.T) < 1.2, "inner", "outer")
    >>> model = kq.TransportClassifier(random_state=0, device="cpu").fit(X[:100], y[:100])
    >>> model.score(X[100:], y[100:]) > 0.9
    True
    """

    _estimator_type = "classifier"
    network_: Mapper
    classes_: Shaped[np.ndarray, " classes"]
    mean_: Float64[np.ndarray, " features"]
    scale_: Float64[np.ndarray, " features"]
    history_: list[dict[str, float]]  # one row an epoch: loss and, where points are held out, theirs
    n_features_in_: int
    feature_names_in_: Shaped[np.ndarray, " features"]  # where X told them

    def __init__(
        self,
        geometry: str = "circle",
        match: str = "ot",
        hidden: Sequence[int] = (32, 32),
        epochs: int = 100,
        random_state: Any = None,
        device: str | torch.device = "auto",
        verbose: bool = False,
    ) -> None:
        self.geometry, self.match, self.hidden, self.epochs = geometry, match, hidden, epochs
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def fit(self, X: Any, y: Any = None) -> TransportClassifier:
        """Learn from samples and one label for each; y may be left out where X, of `kq.data`, has it."""
        self._check()
        device, points = pick_device(self.device), points_of(X)
        labels = labels_of(type(self).__name__, _target(X) if y is None else y, points.samples)
        classes, numbers = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            only = label_facts(classes)["labels"][0]
            raise ValueError(f"y holds only one class, {only!r}: a classifier needs two or more")
        seed = seed_of(self.random_state)
        learned, held = (points.of(samples) for samples in hold_out(numbers, HOLDOUT, seed))
        mean, scale = statistics([points.values[learned]])
        x = torch.from_numpy((points.values - mean) / scale)
        target = torch.from_numpy(numbers[points.owner])
        with seeded(seed, device), bars(self.verbose) as progress:
            network = self._network(x.shape[1], len(classes)).to(device)
            dims = network.centres.shape[1]
            samples = align(x[learned], target[learned], dims, self.match, seed, progress).to(device)
            checked = align(x[held], target[held], dims, "mean", seed).to(device) if held.any() else None
            history = self._train(network, samples, checked, seed, progress)
        self.network_, self.classes_, self.mean_, self.scale_ = network, classes, mean, scale
        self.history_, self.params_ = history, self._plain_params()
        self._keep_columns(points.names, len(mean))
        return self

    def predict_proba(self, X: Any) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (n, classes), in the order of `classes_`."""
        return self._log_scores(X).softmax(-1).numpy()

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """The likeliest class of each sample."""
        found = self._log_scores(X)  # first: what is not fitted has no classes
        return self.classes_[found.argmax(1).numpy()]

    def score(self, X: Any, y: Any = None) -> float:
        """The share of samples whose class is predicted; y may be left out as in `fit`."""
        found = self.predict(X)
        return float(np.mean(found == labels_of(type(self).__name__, _target(X) if y is None else y, len(found))))

    def save(self, path: str | Path) -> None:
        """Write everything that predicting needs, and the parameters of the fit, into one safetensors file."""
        self._check_fitted()
        names = getattr(self, "feature_names_in_", None)
        facts: dict[str, Any] = {"params": self.params_, "classes": label_facts(self.classes_)}
        facts |= {"history": self.history_, "names": None if names is None else list(names)}
        tensors = {f"network.{name}": tensor for name, tensor in self.network_.state_dict().items()}
        tensors |= {"mean": torch.from_numpy(self.mean_), "scale": torch.from_numpy(self.scale_)}
        write_fitted(path, type(self).__name__, facts, tensors)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "auto") -> TransportClassifier:
        """The classifier of a file that `save` wrote, to run on `device`."""
        pick_device(device)
        facts, tensors = read_fitted(path, cls.__name__)
        try:
            made = cls(**{**facts["params"], "hidden": tuple(facts["params"]["hidden"]), "device": device})
            made._check()
            made.classes_, made.history_ = classes_of(facts["classes"]), list(facts["history"])
            made.params_ = {**facts["params"], "hidden": made.hidden}
            mean, scale = tensors.pop("mean"), tensors.pop("scale")
            weights = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
            if not all(tensor.isfinite().all() for tensor in (mean, scale)):
                raise ValueError("it holds NaN or infinity")
            if mean.ndim != 1 or mean.shape != scale.shape or not (scale > 0).all():
                raise ValueError("mean and scale must be (features,), and scale above 0")
            made._keep_columns(facts["names"], len(mean))
            made.network_ = filled(lambda: made._network(len(mean), len(made.classes_)), weights, len(made.hidden))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is no whole {cls.__name__}: {str(error).splitlines()[0]}") from None
        made.mean_, made.scale_ = mean.double().numpy(), scale.double().numpy()
        return made

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _check(self) -> None:
        check_choice("geometry", self.geometry, GEOMETRIES)
        check_choice("match", self.match, MATCHES)
        check_sizes(self, ["epochs"])
        if not isinstance(self.hidden, (tuple, list)):
            raise TypeError(f"hidden must be the widths of layers, such as (32, 32), got {self.hidden!r}")
        for width in self.hidden:
            check_count("hidden", width)

    def _network(self, features: int, classes: int) -> Mapper:
        dims = max(features, room(self.geometry, classes))
        where = centres(self.geometry, classes, dims)
        return Mapper(features, where, self.hidden, learned=self.geometry == "learned")

    def _train(
        self, network: Mapper, samples: Aligned, checked: Aligned | None, seed: int, progress: Progress
    ) -> list[dict[str, float]]:
        size = -(-len(samples.x) // STEPS)
        draw, every = epochs_of(samples.take, len(samples.x), size, seed)
        learned = self.geometry == "learned"

        def validate(model: nn.Module) -> float:
            """A proper score on what is held out: of fixed centres the squared distance to the right one."""
            assert checked is not None
            if learned:
                return float(cross_entropy(-network.distances(checked.x), checked.target))
            return float(map_loss(model, checked))

        recipe = Recipe(
            steps=self.epochs * every,
            lr=LR,
            schedule="flat",
            warmup=0,
            weight_decay=0.0,
            clip=None,
            seed=seed,
            bf16=False,
            check_every=every,
            patience=PATIENCE,
        )
        loss = learned_loss if learned else map_loss
        try:
            log = train(network, draw, loss, recipe, validate=validate if checked else None, progress=progress)
        except FloatingPointError as error:  # the loop names more than a classifier can be told
            raise FloatingPointError(f"{str(error).split(':')[0]}: X may hold values too large") from None
        names = {"loss": "loss", "validation": "held_out_loss"}
        return [
            {"epoch": int(row["step"]) // every, **{names[key]: row[key] for key in names if key in row}}
            for row in log.rows
        ]

    def _points(self, X: Any) -> Points:
        self._check_fitted()
        points = points_of(X)
        known = (getattr(self, "feature_names_in_", None), self.n_features_in_)
        check_features(type(self).__name__, known, (points.names, points.values.shape[1]))
        return points

    @torch.no_grad()
    def _log_scores(self, X: Any) -> Float64[Tensor, "n classes"]:
        """−Σ over steps of ‖f(x) − μ_c‖, in float64, so that a sample's score is the same whatever stands beside it."""
        points, device = self._points(X), pick_device(self.device)
        network = copy.deepcopy(self.network_).double().to(device)
        x = torch.from_numpy((points.values - self.mean_) / self.scale_)
        found = torch.cat([network.distances(some.to(device)).cpu() for some in x.split(CHUNK)])
        if not found.isfinite().all():
            raise ValueError(
                f"X holds values too large: up to {x.abs().max():.0e} standard deviations of the training data"
            )
        scores = found.new_zeros(points.samples, len(self.classes_))
        return scores.index_add(0, torch.from_numpy(points.owner), -found)


def _target(X: Any) -> Any:
    """Labels that X itself has."""
    return X.labels if isinstance(X, Series) else target_of(X)
