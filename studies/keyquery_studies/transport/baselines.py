"""Baselines of TransportClassifier: small Transformers, an MLP, logistic regression and gradient-boosted trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.layers import Attention, Encoder
from keyquery.learn.base import hold_out, seeded
from keyquery.learn.inputs.sequences import statistics
from keyquery.learn.series.training import epochs_of
from keyquery.learn.training import Recipe, train
from keyquery.learn.transport.classifier import TransportClassifier
from keyquery.support.extras import optional

TRANSPORT: dict[str, dict[str, Any]] = {
    "ot": {"match": "ot"},
    "random": {"match": "random"},
    "mean": {"match": "mean"},
    "simplex": {"geometry": "simplex"},
}
METHODS = (*TRANSPORT, "transformer", "published", "perceptron", "logistic", "boosting")
# As published: heads, their width, that between the maps of a block, the classifier's; dropout in blocks and in it.
HEADS, HEAD_DIM, INNER, OUTER, DROPOUT, LAST_DROPOUT = 10, 16, 32, 8, 0.1, 0.4
WIDTH = 16  # that an Encoder lifts points to: its norms would leave little of two features
HIDDEN = (32, 32)  # of the MLP, as in TransportClassifier
HELD_OUT, PATIENCE, STEPS = 0.2, 20, 10  # as TransportClassifier has them
# Epochs, optimiser and learning rate.
RECIPES = {
    "transformer": (200, "adamw", 3e-3),
    "published": (200, "rmsprop", 1e-2),
    "perceptron": (100, "adamw", 1e-2),
}


class PublishedBlock(nn.Module):
    """x + norm(attention(x)), then x + norm(map(x)): as released, norms stand on the branches."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim, HEADS, head_dim=HEAD_DIM, dropout=DROPOUT)
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-6) for _ in range(2))
        self.map = nn.Sequential(nn.Linear(dim, INNER), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(INNER, dim))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        """One block."""
        x = x + self.norms[0](self.dropout(self.attention(x)))
        return x + self.norms[1](self.map(x))


class Transformer(nn.Module):
    """Sequences to logits: a block without positions, the mean over steps, and a small classifier.

    The published one works on the features themselves; the other lifts them to 16 dimensions, into a `kq.Encoder`.
    """

    def __init__(self, kind: str, features: int, classes: int) -> None:
        super().__init__()
        width = features if kind == "published" else WIDTH
        self.lift = nn.Identity() if kind == "published" else nn.Linear(features, WIDTH)
        self.body: nn.Module = PublishedBlock(width)
        if kind == "transformer":
            self.body = Encoder(width, 1, HEADS, head_dim=HEAD_DIM, hidden=INNER, dropout=DROPOUT)
        self.head = nn.Sequential(
            nn.Linear(width, OUTER), nn.ReLU(), nn.Dropout(LAST_DROPOUT), nn.Linear(OUTER, classes)
        )

    def forward(self, x: Float[Tensor, "batch n features"]) -> Float[Tensor, "batch classes"]:
        """Logits."""
        return self.head(self.body(self.lift(x)).mean(1))


class Perceptron(nn.Module):
    """Points to logits, by the network of TransportClassifier, which learns by cross-entropy here."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        first, second = HIDDEN
        layers = (nn.Linear(features, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU())
        self.layers = nn.Sequential(*layers, nn.Linear(second, classes))

    def forward(self, x: Float[Tensor, "batch n features"]) -> Float[Tensor, "batch classes"]:
        """Logits: scores of steps are multiplied."""
        return self.layers(x).log_softmax(-1).sum(1)


class Learned(NamedTuple):
    """What predicts the numbers of classes, and facts of how it came about."""

    predict: Callable[[np.ndarray], Int[np.ndarray, " n"]]
    facts: dict[str, Any]


class Labelled(NamedTuple):
    """Standardised sequences and the numbers of their classes."""

    x: Float[Tensor, "n steps features"]
    y: Int[Tensor, " n"]

    def take(self, index: Any) -> Labelled:
        """Some of them."""
        chosen = torch.as_tensor(index, device=self.y.device)
        return Labelled(self.x[chosen], self.y[chosen])


def class_loss(model: nn.Module, batch: Labelled) -> Float[Tensor, ""]:
    """Cross-entropy."""
    return cross_entropy(model(batch.x), batch.y)


def learn(method: str, x: np.ndarray, y: np.ndarray, seed: int, device: str, epochs: int | None = None) -> Learned:
    """Fit a method to sequences (n, steps, features); `epochs` at most, in place of its own number."""
    if method in TRANSPORT:
        model = TransportClassifier(**TRANSPORT[method], epochs=epochs or 100, random_state=seed, device=device).fit(
            x, y
        )
        return Learned(model.predict, {"epochs": len(model.history_), "parameters": _size(model.network_)})
    if method in RECIPES:
        return _network(method, x, y, seed, device, epochs)
    return _scikit(method, x, y, seed)


def recipe_of(method: str, every: int, seed: int, epochs: int | None = None, patience: int | None = PATIENCE) -> Recipe:
    """How a network is trained, where an epoch has `every` steps."""
    own, optimiser, lr = RECIPES[method]
    plain: dict[str, Any] = {"schedule": "flat", "warmup": 0, "weight_decay": 0.0, "clip": None, "bf16": False}
    steps = (own if epochs is None else epochs) * every
    return Recipe(steps, lr=lr, optimiser=optimiser, seed=seed, check_every=every, patience=patience, **plain)


def _network(method: str, x: np.ndarray, y: np.ndarray, seed: int, device: str, epochs: int | None) -> Learned:
    learned, held = hold_out(y, HELD_OUT, seed)
    mean, scale = statistics(list(x[learned].astype(np.float64)))
    samples = Labelled(standardised(x, mean, scale, device), torch.from_numpy(y).to(device))
    checked, points = samples.take(held), samples.take(learned)
    if method == "perceptron":  # a point a step
        points = Labelled(points.x.flatten(0, 1).unsqueeze(1), points.y.repeat_interleave(x.shape[1]))
        checked = Labelled(checked.x.flatten(0, 1).unsqueeze(1), checked.y.repeat_interleave(x.shape[1]))
    with seeded(seed, device):
        sizes = (x.shape[2], int(y.max()) + 1)
        network = (Perceptron(*sizes) if method == "perceptron" else Transformer(method, *sizes)).to(device)
        draw, every = epochs_of(points.take, len(points.y), -(-len(points.y) // STEPS), seed)
        recipe = recipe_of(method, every, seed, epochs)
        log = train(network, draw, class_loss, recipe, validate=lambda model: float(class_loss(model, checked)))

    @torch.no_grad()
    def predict(x_new: np.ndarray) -> Int[np.ndarray, " n"]:
        parts = standardised(x_new, mean, scale, device).split(500)
        return torch.cat([network(part).argmax(1) for part in parts]).cpu().numpy()

    return Learned(predict, {"epochs": len(log.rows), "parameters": _size(network)})


def standardised(
    x: np.ndarray, mean: np.ndarray, scale: np.ndarray, device: str = "cpu"
) -> Float[Tensor, "n steps features"]:
    """Sequences in units of what was learned from."""
    return torch.from_numpy(((x - mean) / scale).astype(np.float32)).to(device)


def _scikit(method: str, x: np.ndarray, y: np.ndarray, seed: int) -> Learned:
    """Logistic regression on standardised features, or histogram boosting: a point a step, scores multiplied."""
    if method == "logistic":
        scaler = optional("sklearn.preprocessing", "a baseline").StandardScaler()
        estimator = optional("sklearn.linear_model", "a baseline").LogisticRegression(max_iter=1000)
        model = optional("sklearn.pipeline", "a baseline").make_pipeline(scaler, estimator)
    else:
        model = optional("sklearn.ensemble", "a baseline").HistGradientBoostingClassifier(random_state=seed)
    steps, features = x.shape[1:]
    model.fit(x.reshape(-1, features), y.repeat(steps))

    def predict(x_new: np.ndarray) -> Int[np.ndarray, " n"]:
        shares = model.predict_proba(x_new.reshape(-1, features)).astype(np.float64)
        each = np.log(np.clip(shares, 1e-300, None))
        return each.reshape(len(x_new), steps, -1).sum(1).argmax(1)

    return Learned(predict, {"epochs": None, "parameters": None})


def _size(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())
