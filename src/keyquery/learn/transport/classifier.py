"""TransportClassifier: an MLP trained on optimal-transport pairs of points and class targets."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.forms.coupling import match
from keyquery.learn.base import Classifier, SavedEstimator, check_is_fitted, check_sizes, hold_out, seed_of, seeded
from keyquery.learn.fitting import epochs_of, fit_network
from keyquery.learn.inputs.sequences import restored_statistics, statistics
from keyquery.learn.inputs.tables import check_features, points_of
from keyquery.learn.inputs.targets import classes_of, label_facts
from keyquery.learn.training import Recipe
from keyquery.support.checks import check_choice, checked_integers
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress, bars, silent

GEOMETRIES = ("circle", "simplex", "learned")
MATCHES = ("ot", "random", "mean")
SIDE = 4.0  # initial distance of learned centres: of two classes N(μ_c, I), one point in forty is nearer to the other
PULL = 0.1  # weight of the squared error beside the cross-entropy, if centres are learned
EXACT = 1000  # points per class that are matched exactly: half a second at most; time is cubic
BATCH = 250  # points per mini-batch for larger classes
STEPS = 10  # per epoch
CHUNK = 2**16  # points per forward pass


@dataclass(eq=False, repr=False)
class TransportClassifier(Classifier, SavedEstimator):
    """Classifier by optimal transport: an MLP maps each class to its own Gaussian.

    From a paper: its optimal matching differs on no dataset from random partners of the same class.

    Class c has the target N(μ_c, I). The standardised points of a class are paired with as many samples of its target
    by optimal transport, and an MLP f is trained on the pairs (squared error, Adam):

        p(c | x) = softmax_c(−‖f(x) − μ_c‖)

    X is a table (n, features), sequences (n, T, features), or a list of sequences of any length; for sequences each
    time step is a point, and the scores of all time steps are multiplied.

    Parameters
    ----------
    geometry
        Where the μ_c are: on a "circle" of radius 3k for k classes, at the vertices of a "simplex", or "learned",
        initialised at a simplex and trained with the cross-entropy of the prediction. A circle has 2 dimensions and a
        simplex k − 1; if X has fewer features, it is zero-padded for the pairing. On a circle, as published, with four
        or more classes the nearest centre is not always the most probable class. Default: "learned".
    match
        "ot", or one of two controls: "random" pairs within the class, and "mean", which maps every point to μ_c.
        Default: "ot".
    hidden
        Widths of the hidden layers. Default: (32, 32).
    epochs, lr
        Default: 100, 1e-2.
    validation_fraction
        Share of each class used as the validation split; the weights of the best epoch are kept. With 0, all epochs
        are run. Default: 0.2.
    patience
        Epochs without improvement on the validation split before training stops. Default: 20.
    class_weight
        None, "balanced" or {label: weight}. Default: None.
    random_state
        Seed: None, an integer or a numpy generator. Default: None.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere lines. Default: False.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> y = np.where(np.hypot(*X.T) < 1.2, "inner", "outer")
    >>> model = kq.TransportClassifier(random_state=0, device="cpu").fit(X[:100], y[:100])
    >>> model.score(X[100:], y[100:]) > 0.9
    True
    """

    geometry: str = "learned"
    match: str = "ot"
    hidden: Sequence[int] = (32, 32)
    epochs: int = 100
    lr: float = 1e-2
    validation_fraction: float = 0.2
    patience: int = 20
    class_weight: Any = None
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: bool = False

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> TransportClassifier:
        """Fit to samples X, labels y (n,) and weights (n,).

        Parameters
        ----------
        X
            Samples: an array (n, columns), a `kq.data.Table` or a `kq.data.Series`.
        y
            Labels (n,). Default: those of X, if X is a `kq.data.Table` or `Series`.
        sample_weight
            Weights (n,) of the loss; samples of weight 0 are left out. Default: all 1.

        Returns
        -------
        TransportClassifier
            The fitted estimator.
        """
        self._check()
        device, points = pick_device(self.device), points_of(X)
        kept, classes, numbers, weights = self._labelled(X, y, points.samples, sample_weight)
        points, seed = points.chosen(kept), seed_of(self.random_state)
        learned, held = (points.of(samples) for samples in hold_out(numbers, self.validation_fraction, seed))
        mean, scale = statistics([points.values[learned]])
        x = torch.from_numpy((points.values - mean) / scale)
        target, weight = torch.from_numpy(numbers[points.owner]), torch.from_numpy(weights[points.owner])
        with seeded(seed, device), bars(self.verbose) as progress:
            network = self._network(x.shape[1], len(classes)).to(device)

            def aligned(rows: Bool[np.ndarray, " points"], how: str) -> Aligned:
                offset = align(x[rows], target[rows], network.centres.shape[1], how, seed, progress)
                return Aligned(x[rows], target[rows], offset, weight[rows]).to(device)

            history = self._train(network, aligned(learned, self.match), aligned(held, "mean"), seed, progress)
        self.network_, self.classes_, self.mean_, self.scale_ = network, classes, mean, scale
        self.history_, self.params_ = history, self._plain_params()
        self._keep_columns(points.names, len(mean))
        return self

    def _logits(self, X: Any) -> Float64[Tensor, "n classes"]:
        check_is_fitted(self)
        points, device = points_of(X), pick_device(self.device)
        known = (getattr(self, "feature_names_in_", None), self.n_features_in_)
        check_features(type(self).__name__, known, (points.names, points.values.shape[1]))
        network = copy.deepcopy(self.network_).double().to(device)  # so that scores do not depend on the batch
        x = torch.from_numpy((points.values - self.mean_) / self.scale_)
        with torch.no_grad():
            distances = torch.cat([network.distances(chunk.to(device)).cpu() for chunk in x.split(CHUNK)])
        if not distances.isfinite().all():
            raise ValueError(f"X holds values too large: up to {x.abs().max():.0e} standard deviations of those in fit")
        scores = distances.new_zeros(points.samples, len(self.classes_))
        return scores.index_add(0, torch.from_numpy(points.owner), -distances)

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        names = getattr(self, "feature_names_in_", None)
        facts = {"classes": label_facts(self.classes_), "names": None if names is None else list(names)}
        return facts, {"mean": torch.from_numpy(self.mean_), "scale": torch.from_numpy(self.scale_)}

    @classmethod
    def _params_of(cls, facts: dict[str, Any]) -> dict[str, Any]:
        return {**facts["params"], "hidden": tuple(facts["params"]["hidden"])}

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], Mapper], int]:
        self.classes_ = classes_of(facts["classes"])
        self.mean_, self.scale_ = restored_statistics(tensors, "features")
        self._keep_columns(facts["names"], len(self.mean_))
        return lambda: self._network(len(self.mean_), len(self.classes_)), len(self.hidden)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _check(self) -> None:
        check_choice("geometry", self.geometry, GEOMETRIES)
        check_choice("match", self.match, MATCHES)
        check_sizes(self, ["epochs", "patience"], lr=math.inf, validation_fraction=1)
        checked_integers("hidden", self.hidden, least=1)

    def _network(self, features: int, classes: int) -> Mapper:
        where = centres(self.geometry, classes, features)
        return Mapper(features, where, self.hidden, learned=self.geometry == "learned")

    def _train(
        self, network: Mapper, samples: Aligned, checked: Aligned, seed: int, progress: Progress
    ) -> list[dict[str, float]]:
        size = -(-len(samples.x) // STEPS)
        draw, every = epochs_of(samples.take, len(samples.x), size, seed)
        loss, validation_loss = (learned_loss, class_loss) if self.geometry == "learned" else (map_loss, map_loss)
        recipe = Recipe(
            steps=self.epochs * every,
            lr=self.lr,
            schedule="flat",
            warmup=0,
            weight_decay=0.0,
            clip=None,
            seed=seed,
            bf16=False,
            check_every=every,
            patience=self.patience,
        )
        log = fit_network(
            network,
            draw,
            loss,
            recipe,
            validate=(lambda model: float(validation_loss(model, checked))) if len(checked.x) else None,
            progress=progress,
            advice="X may hold values too large, or a smaller lr may help",
            verbose=self.verbose,
        )
        history = []
        for row in log.rows:
            validation = {"validation_loss": row["validation"]} if "validation" in row else {}
            history.append({"epoch": int(row["step"]) // every, "loss": row["loss"], **validation})
        return history


def centres(geometry: str, classes: int, dims: int) -> Float64[Tensor, "k dims"]:
    """Centres μ_c of k classes: on a circle, μ_c = 3k (sin 2πc/k, cos 2πc/k, 0, …), or at the corners of a simplex.

    There are as many dimensions as the centres need, 2 or k − 1, and at least `dims`. The edges of the simplex are as
    long as those between neighbours on the circle, 6k sin π/k: for two or three classes both are equal up to a
    rotation. The nearest centre to Σ_c p_c μ_c is that of the largest p_c on a simplex, and on a circle with up to
    three classes. Learned centres start as a simplex with edges of 4, so that some points are wrong.
    """
    positions = torch.zeros(classes, max(dims, 2 if geometry == "circle" else classes - 1), dtype=torch.float64)
    if geometry == "circle":
        turns = 2 * torch.pi * torch.arange(classes, dtype=torch.float64) / classes
        positions[:, :2] = 3 * classes * torch.stack((turns.sin(), turns.cos()), 1)
        return positions
    # Helmert's rows: orthonormal, and orthogonal to (1, …, 1), so that unit vectors keep their distance √2 in them.
    for row in range(1, classes):
        positions[:row, row - 1], positions[row, row - 1] = 1.0, -float(row)
        positions[:, row - 1] /= (row * (row + 1)) ** 0.5
    side = SIDE if geometry == "learned" else 6 * classes * float(np.sin(np.pi / classes))
    return positions * side / 2**0.5


class Aligned(NamedTuple):
    """Standardised points, their classes, targets relative to the centre of the class, and weights."""

    x: Float[Tensor, "points features"]
    target: Int[Tensor, " points"]
    offset: Float[Tensor, "points dims"]
    weight: Float[Tensor, " points"]

    def take(self, index: np.ndarray) -> Aligned:
        """A subset of the points."""
        chosen = torch.as_tensor(index, device=self.x.device)
        return Aligned(*(part[chosen] for part in self))

    def to(self, device: str) -> Aligned:
        """The same in float32 on another device."""
        return Aligned(*(part.to(device, torch.float32 if part.is_floating_point() else part.dtype) for part in self))

    def mean(self, losses: Float[Tensor, " points"]) -> Float[Tensor, ""]:
        """The weighted mean of the losses of all points."""
        return (self.weight * losses).sum() / self.weight.sum()


def align(
    x: Float64[Tensor, "points features"],
    target: Int[Tensor, " points"],
    dims: int,
    how: str,
    seed: int,
    progress: Progress = silent,
) -> Float64[Tensor, "points dims"]:
    """Pair the points of each class with as many samples of N(0, I), their targets around the class centre.

    "ot" minimises Σ‖x − sample‖² within each class, "random" pairs at random, "mean" sets all targets to 0. For squared
    distances the optimal pairing does not depend on the centre. Missing dimensions are zero-padded. A class of more
    than 1,000 points is matched in random mini-batches of 250, so that time is linear and not cubic.
    """
    rng = np.random.default_rng((seed, 1))
    if how == "mean":
        return torch.zeros(len(x), dims, dtype=torch.float64)
    offset = torch.from_numpy(rng.normal(size=(len(x), dims)))
    if how == "ot":
        wide = torch.nn.functional.pad(x, (0, dims - x.shape[1]))
        if (large := int(target.bincount().max())) > EXACT:
            warnings.warn(
                f"a class of {large:,} points, more than {EXACT:,}, is matched exactly only within mini-batches of "
                f"{BATCH}",
                stacklevel=4,
            )
        blocks: list[Tensor] = []
        for number in target.unique():
            members = (target == number).nonzero()[:, 0]
            if len(members) > EXACT:  # in random batches whose sizes differ by at most one
                shuffled = members[torch.from_numpy(rng.permutation(len(members)))]
                blocks += shuffled.tensor_split(-(-len(members) // BATCH))
            else:
                blocks.append(members)
        for block in progress(blocks, "matching", len(blocks)):
            offset[block] = offset[block][match(wide[block], offset[block])]
    return offset


class Mapper(nn.Module):
    """f(x): features to the space of the centres, by layers of `hidden` widths with ReLU between them.

    `centres` (classes, dims) are parameters if `learned`, else fixed.
    """

    centres: Float[Tensor, "k dims"]

    def __init__(
        self, features: int, where: Float64[Tensor, "k dims"], hidden: Sequence[int], learned: bool = False
    ) -> None:
        super().__init__()
        layers = list[nn.Module]()
        for inputs, outputs in pairwise([features, *hidden, where.shape[1]]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        if learned:
            self.centres = nn.Parameter(where.float())
        else:
            self.register_buffer("centres", where.float())

    def forward(self, x: Float[Tensor, "points features"]) -> Float[Tensor, "points dims"]:
        """f(x)."""
        return self.layers(x)

    def distances(self, x: Float[Tensor, "points features"]) -> Float[Tensor, "points k"]:
        """‖f(x) − μ_c‖ for every class."""
        # A tiny number under the root keeps the gradient finite at a centre.
        return ((self(x).unsqueeze(1) - self.centres).square().sum(-1) + 1e-12).sqrt()


def map_loss(model: nn.Module, batch: Aligned) -> Float[Tensor, ""]:
    """‖f(x) − μ_c − offset‖², the mean over points and dimensions, without gradients of the centres."""
    assert isinstance(model, Mapper)
    targets = model.centres.detach()[batch.target] + batch.offset
    return batch.mean((model(batch.x) - targets).square().mean(1))


def class_loss(model: nn.Module, batch: Aligned) -> Float[Tensor, ""]:
    """Cross-entropy of softmax(−‖f(x) − μ_c‖)."""
    assert isinstance(model, Mapper)
    return batch.mean(cross_entropy(-model.distances(batch.x), batch.target, reduction="none"))


def learned_loss(model: nn.Module, batch: Aligned) -> Float[Tensor, ""]:
    """`class_loss`, which trains map and centres, plus a tenth of `map_loss`."""
    return PULL * map_loss(model, batch) + class_loss(model, batch)
