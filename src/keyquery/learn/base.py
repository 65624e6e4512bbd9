"""Base classes of the estimators, on those of scikit-learn: seeds, validation splits, save and load."""

from __future__ import annotations

import copy
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from keyquery.learn.inputs.tables import target_of
from keyquery.learn.inputs.targets import label_facts, labels_of, weights_of
from keyquery.reading import digests, plain, provenance
from keyquery.support.bounded_json import parse_json
from keyquery.support.checks import check_count, check_number
from keyquery.support.devices import pick_device
from keyquery.support.extras import optional
from keyquery.support.files import write_all

sklearn = optional("sklearn.base", "an estimator")
BaseEstimator: Any = sklearn.BaseEstimator
ClassifierMixin: Any = sklearn.ClassifierMixin
RegressorMixin: Any = sklearn.RegressorMixin
check_is_fitted = optional("sklearn.utils.validation", "an estimator").check_is_fitted

FORMAT = 1
SHOWN = 230  # characters of a repr that are not blank
SEEDED = RLock()  # torch's generators are global to the process
Saved = TypeVar("Saved", bound="SavedEstimator")
Network = TypeVar("Network", bound=nn.Module)


class Estimator(BaseEstimator):  # type: ignore[misc]
    """scikit-learn's base class: constructor arguments are stored unchanged, fitted attributes end in `_`."""

    params_: dict[str, Any]  # the parameters at the time of fit

    def __repr__(self, N_CHAR_MAX: int = SHOWN) -> str:
        """As in scikit-learn, on one line."""
        return " ".join(super().__repr__(N_CHAR_MAX).split())

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: networks are moved to the CPU, so that they load on machines without a GPU."""
        return {
            name: copy.deepcopy(value).cpu() if isinstance(value, nn.Module) else value
            for name, value in super().__getstate__().items()
        }

    def _plain_params(self) -> dict[str, Any]:
        """The parameters as JSON, for `params_`; a random generator is stored as None."""
        params = plain(self.get_params())
        state = params["random_state"]
        return {**params, "random_state": state if isinstance(state, int) else None, "device": str(params["device"])}

    def _keep_columns(self, names: Sequence[str] | None, count: int) -> None:
        """Set `n_features_in_`, and `feature_names_in_` if the columns have names."""
        self.n_features_in_ = count
        if names is not None:
            self.feature_names_in_ = np.array(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_


class Classifier(ClassifierMixin):  # type: ignore[misc]
    """A classifier of samples that may carry their labels."""

    classes_: Shaped[np.ndarray, " classes"]

    def predict_proba(self, X: Any) -> Float64[np.ndarray, "n classes"]:
        """Probabilities (n, classes) of samples as in `fit`, in the order of `classes_`."""
        return self._logits(X).softmax(-1).numpy()

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """Predicted class of each sample (n,): the most probable one."""
        probabilities = self.predict_proba(X)  # raises if not fitted
        return self.classes_[probabilities.argmax(1)]

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy. Default y: as in `fit`."""
        predicted = self.predict(X)
        truth = labels_of(type(self).__name__, target_of(X, y), len(predicted))
        return float(np.average(predicted == truth, weights=sample_weight))  # scikit-learn's rejects bytes labels

    @abstractmethod
    def _logits(self, X: Any) -> Float64[Tensor, "n classes"]:
        """Logits on the CPU; raises if not fitted."""

    def _labelled(self, X: Any, y: Any, count: int, sample_weight: Any = None) -> tuple[np.ndarray, ...]:
        """Which samples have a weight above 0, the classes, and class indices and weights of those samples."""
        name = type(self).__name__
        labels = labels_of(name, target_of(X, y), count)
        weights = weights_of(name, labels, sample_weight, getattr(self, "class_weight", None))
        kept = weights > 0
        classes, codes = np.unique(labels[kept], return_inverse=True)
        if len(classes) < 2:
            only = label_facts(classes)["labels"][0]
            raise ValueError(f"y holds only one class, {only!r}: a classifier needs two or more")
        return kept, classes, codes, weights[kept]


class SavedEstimator(Estimator, ABC):
    """An estimator that is saved as one safetensors file: facts as JSON in the metadata, and tensors."""

    _prefix: ClassVar[str] = "network."  # of the network's tensors
    network_: Any
    history_: list[dict[str, float]]

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator, everything that prediction needs, to one safetensors file."""
        check_is_fitted(self)
        facts, tensors = self._saved()
        tensors |= {f"{self._prefix}{name}": weight for name, weight in self.network_.state_dict().items()}
        kind = {"kind": type(self).__name__, "format": FORMAT}
        metadata = json.dumps({**kind, "params": self.params_, "history": self.history_, **facts}, allow_nan=False)
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_all({Path(path): save(stored, {"keyquery": metadata})})

    @classmethod
    def load(cls: type[Saved], path: str | Path, device: str | torch.device = "auto") -> Saved:
        """Load an estimator written by `save`, to run on `device`. Raises ValueError if the file is not one."""
        pick_device(device)
        facts, tensors = read_fitted(path, cls.__name__)
        try:
            params = cls._params_of(facts).items()  # those of former versions are left out
            known = {name: value for name, value in params if name in cls._get_param_names()}
            estimator = cls(**{**known, "device": device})
            estimator._check()
            estimator.params_, estimator.history_ = known, list(facts["history"])
            build, depth = estimator._restore(facts, tensors)
            weights = {name.removeprefix(cls._prefix): tensor for name, tensor in tensors.items()}
            estimator.network_ = filled(build, weights, depth)
        except KeyError as error:
            raise ValueError(f"{path} is not a complete {cls.__name__} file: missing {error}") from None
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is not a complete {cls.__name__} file: {str(error).splitlines()[0]}") from None
        return estimator

    def _provenance(self, **facts: Any) -> dict[str, Any]:
        """What the readings of this estimator were computed from."""
        estimator = repr(type(self)(**self.params_))
        return provenance(**facts, tensors=digests(self.network_.state_dict()), estimator=estimator)

    @classmethod
    def _params_of(cls, facts: dict[str, Any]) -> dict[str, Any]:
        return dict(facts["params"])

    @abstractmethod
    def _check(self) -> None:
        """Validate the parameters."""

    @abstractmethod
    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Facts and tensors to save beyond the parameters, the history and the network."""

    @abstractmethod
    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], nn.Module], int]:
        """Set fitted attributes, removing their tensors; return the network's constructor and its depth."""


def check_sizes(estimator: Estimator, counts: Sequence[str], **most: float) -> None:
    """Require the parameters named in `counts` to be integers ≥ 1, and the others numbers in [0, bound)."""
    for name in counts:
        check_count(name, getattr(estimator, name), least=1)
    for name, end in most.items():
        check_number(name, value := getattr(estimator, name))
        if not 0 <= value < end:
            bound = "" if end == math.inf else f" and below {end:g}"
            raise ValueError(f"{name} must be at least 0{bound}, got {value}")


def seed_of(random_state: Any) -> int:
    """A seed below 2²⁰ from None, an integer, or a numpy generator; larger integers are hashed into that range."""
    most = 2**20
    if random_state is None or isinstance(random_state, np.random.Generator):
        return int(np.random.default_rng(random_state).integers(most))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(most))
    if isinstance(random_state, bool) or not isinstance(random_state, (int, np.integer)) or random_state < 0:
        raise ValueError(f"random_state must be None, an integer ≥ 0 or a numpy generator, got {random_state!r}")
    number = int(random_state)
    return number if number < most else int(np.random.default_rng(number).integers(most))


def hold_out(labels: Shaped[np.ndarray, " n"], share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Stratified training and validation indices; a class with one sample is trained on, others have both."""
    generator, held = np.random.default_rng(seed), np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        if share > 0 and len(members) > 1:
            held[members[: min(max(round(share * len(members)), 1), len(members) - 1)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def filled(build: Callable[[], Network], weights: Mapping[str, Tensor], depth: int) -> Network:
    """Build a network with these weights; shapes are compared first, so a small file cannot allocate huge sizes."""
    if depth > len(weights):
        raise ValueError(f"a network of depth {depth} has more than {len(weights)} tensors")
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in build().state_dict().items()}
    for name in sorted(shapes.keys() | weights.keys()):
        if name not in shapes or name not in weights or shapes[name] != weights[name].shape:
            raise ValueError(f"{name} does not match a network with these parameters")
    if broken := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise ValueError(f"{broken[0]} holds NaN or infinity")
    with seeded(0, "cpu"):
        network = build()
    network.load_state_dict(weights)
    return network.eval()


def read_fitted(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of a file written by `SavedEstimator.save`; no code in it is executed."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            facts = parse_json((file.metadata() or {}).get("keyquery", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is not a complete estimator file: {error}") from None
    if not isinstance(facts, dict) or facts.pop("kind", None) != kind:
        raise ValueError(f"{path} is not a saved {kind}")
    if (version := facts.pop("format", None)) != FORMAT:
        raise ValueError(f"{path} has format {version!r}; this version reads format {FORMAT}")
    return facts, tensors


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Seed torch's generators, and restore them afterwards; they are global, so threads take turns."""
    with SEEDED, torch.random.fork_rng([torch.device(device)] if device.startswith("cuda") else []):
        torch.manual_seed(seed)
        yield
