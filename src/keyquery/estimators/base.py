"""Base classes of the estimators: scikit-learn parameters, seeds, labels, save and load.

scikit-learn itself is not required: the estimators follow its protocol and do not inherit from it.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from keyquery.capture.load import pick_device
from keyquery.reading import plain
from keyquery.support.bounded_json import parse_json
from keyquery.support.checks import check_count, check_number
from keyquery.support.extras import optional
from keyquery.support.files import write_all
from keyquery.support.printable import brief

FORMAT = 1
LABELS = {"i": "number", "u": "number", "f": "number", "b": "bool", "U": "text", "S": "bytes", "M": "date"}
LETTERS = 1024  # a saved label's dtype may be this wide even if every label is shorter
SEEDED = RLock()  # torch's generators are global to the process
Fitted = TypeVar("Fitted", bound="Estimator")
Saved = TypeVar("Saved", bound="SavedEstimator")
Network = TypeVar("Network", bound=nn.Module)


class NotFittedError(ValueError, AttributeError):
    """Raised when an estimator is used before `fit`."""


class Estimator:
    """scikit-learn parameter handling: constructor arguments are stored unchanged, fitted attributes end in `_`.

    >>> class Mean(Estimator):
    ...     def __init__(self, share=0.5, verbose=False):
    ...         self.share, self.verbose = share, verbose
    >>> Mean(share=0.1).set_params(verbose=True)
    Mean(share=0.1, verbose=True)
    """

    _estimator_type: ClassVar[str]  # read by scikit-learn before 1.6
    params_: dict[str, Any]  # the parameters at the time of fit

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        parameters = list(signature(cls.__init__).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in parameters}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name; `deep` has no effect, since no parameter is an estimator."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self: Fitted, **params: Any) -> Fitted:
        """Set parameters, which take effect at the next fit."""
        known = self._defaults()
        for name in params:
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(known)}")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        known = self._defaults()
        params = self.get_params().items()
        changed = [f"{name}={brief(value)}" for name, value in params if repr(value) != repr(known[name])]
        return f"{type(self).__name__}({', '.join(changed)})"

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: networks are moved to the CPU, so that they load on machines without a GPU."""
        return {
            name: copy.deepcopy(value).cpu() if isinstance(value, nn.Module) else value
            for name, value in vars(self).items()
        }

    def __sklearn_is_fitted__(self) -> bool:
        return any(name.endswith("_") and not name.startswith("_") for name in vars(self))

    def __sklearn_tags__(self) -> Any:
        tags, kind = optional("sklearn.utils", "scikit-learn's tags"), getattr(self, "_estimator_type", None)
        return tags.Tags(
            estimator_type=kind,
            target_tags=tags.TargetTags(required=kind is not None),
            classifier_tags=tags.ClassifierTags() if kind == "classifier" else None,
            regressor_tags=tags.RegressorTags() if kind == "regressor" else None,
            input_tags=tags.InputTags(),
        )

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

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            try:
                error = optional("sklearn.exceptions", "its error").NotFittedError
            except ImportError:
                error = NotFittedError
            raise error(f"this {type(self).__name__} is not fitted yet: call fit first")


class SavedEstimator(Estimator, ABC):
    """An estimator that is saved as one safetensors file: facts as JSON in the metadata, and tensors."""

    _prefix: ClassVar[str] = "network."  # of the network's tensors
    network_: Any
    history_: list[dict[str, float]]

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator, everything that prediction needs, to one safetensors file."""
        self._check_fitted()
        self._write(path, *self._saved())

    @classmethod
    def load(cls: type[Saved], path: str | Path, device: str | torch.device = "auto") -> Saved:
        """Load an estimator written by `save`, to run on `device`. Raises ValueError if the file is not one."""
        pick_device(device)
        facts, tensors = read_fitted(path, cls.__name__)
        try:
            estimator = cls(**{**cls._params_of(facts), "device": device})
            estimator._check()
            estimator.params_, estimator.history_ = facts["params"], list(facts["history"])
            build, depth = estimator._restore(facts, tensors)
            weights = {name.removeprefix(cls._prefix): tensor for name, tensor in tensors.items()}
            estimator.network_ = filled(build, weights, depth)
        except KeyError as error:
            raise ValueError(f"{path} is not a complete {cls.__name__} file: missing {error}") from None
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is not a complete {cls.__name__} file: {str(error).splitlines()[0]}") from None
        return estimator

    def _write(self, path: str | Path, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        weights = {f"{self._prefix}{name}": weight for name, weight in self.network_.state_dict().items()}
        facts = {"params": self.params_, "history": self.history_, **facts}
        write_fitted(path, type(self).__name__, facts, weights | tensors)

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
    """Require the parameters named in `counts` to be integers ≥ 1, and the others numbers in [0, bound).

    >>> check_sizes(kq.SeriesClassifier(epochs=0), ["epochs"])
    Traceback (most recent call last):
    ValueError: epochs must be at least 1, got 0
    """
    for name in counts:
        check_count(name, getattr(estimator, name), least=1)
    for name, end in most.items():
        check_number(name, value := getattr(estimator, name))
        if not 0 <= value < end:
            raise ValueError(
                f"{name} must be at least 0{'' if end == math.inf else f' and below {end:g}'}, got {value}"
            )


def seed_of(random_state: Any) -> int:
    """A seed below 2²⁰ from None, an integer, or a numpy generator; larger integers are hashed into that range.

    >>> seed_of(7)
    7
    """
    most = 2**20
    if random_state is None:
        return int(np.random.default_rng().integers(most))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(most))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(most))
    if isinstance(random_state, bool) or not isinstance(random_state, (int, np.integer)) or random_state < 0:
        raise ValueError(f"random_state must be None, an integer ≥ 0 or a numpy generator, got {random_state!r}")
    number = int(random_state)
    return number if number < most else int(np.random.default_rng(number).integers(most))


def labels_of(name: str, y: Any, count: int, what: str = "y", of: str = "X") -> Shaped[np.ndarray, " n"]:
    """Validated class labels (n,): one per sample, none missing; `what` and `of` name labels and samples in errors.

    >>> labels_of("SeriesClassifier", ["up", "down"], 2).tolist()
    ['up', 'down']
    """
    if y is None:
        raise ValueError(f"{name} requires {what} to be passed, but the target {what} is None: pass a label per sample")
    labels = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    if isinstance(y, (list, tuple)) and labels.ndim == 1:
        labels = np.fromiter(y, dtype=object, count=len(y))  # numpy would convert mixed types to text
    if labels.ndim == 2 and labels.shape[1] == 1:
        _warn_of_column()
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(f"{what} must be (n,), one label per sample, got shape {labels.shape}")
    if len(labels) != count:
        raise ValueError(f"{what} must have a label for each of the {count} samples of {of}, got {len(labels)}")
    if np.ma.is_masked(y):
        raise ValueError(f"{what} must have a label for every sample, got masked ones")
    if labels.dtype == object:
        labels = _of_one_type(labels, what)
    if labels.dtype.kind in "fM" and not np.all(np.isfinite(labels)):
        raise ValueError(f"{what} must have a label for every sample, got NaN, NaT or infinity")
    fractions = labels.dtype.kind == "f" and np.any(labels != np.round(labels))
    if fractions or labels.dtype.kind not in LABELS:
        raise ValueError(
            f"Unknown label type: {what} must hold classes, got {labels.dtype} such as {labels.tolist()[0]!r}"
        )
    return labels


def numbers_of(name: str, y: Any, count: int) -> Float64[np.ndarray, " n"]:
    """Validated regression targets (n,): one finite number per sample.

    >>> numbers_of("NPTRegressor", [1, 2.5], 2)
    array([1. , 2.5])
    """
    if y is None:
        raise ValueError(f"{name} requires y to be passed, but the target y is None: pass one number per sample")
    numbers = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        _warn_of_column()
        numbers = numbers[:, 0]
    if numbers.ndim != 1:
        raise ValueError(f"y must be (n,), one number per sample, got shape {numbers.shape}")
    if len(numbers) != count:
        raise ValueError(f"y must have a number for each of the {count} samples of X, got {len(numbers)}")
    if np.ma.is_masked(y):
        raise ValueError("y must have a number for every sample, got masked ones")
    try:
        targets = numbers.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"y must hold numbers, got {numbers.dtype} such as {numbers.tolist()[0]!r}") from None
    if numbers.dtype.kind == "c" or not np.isfinite(targets).all():
        raise ValueError("y must have a finite number for every sample, got NaN, infinity or complex values")
    return targets


def is_missing(value: Any) -> bool:
    """Whether a value is missing: None, NaN, or pandas' NA and NaT.

    >>> is_missing(float("nan")), is_missing("nan")
    (True, False)
    """
    return (
        value is None or type(value).__name__ == "NAType" or bool(value != value)
    )  # NA equals nothing, not even False


def _of_one_type(labels: Shaped[np.ndarray, " n"], what: str) -> Shaped[np.ndarray, " n"]:
    """An object array of labels as an array of their common type."""
    if any(map(is_missing, labels)):
        raise ValueError(f"{what} must have a label for every sample, got None or NaN")
    if len({LABELS.get(np.asarray(label).dtype.kind) for label in labels}) > 1:
        names = sorted({type(label).__name__ for label in labels})
        raise ValueError(f"{what} must hold labels of one type, got {', '.join(names)}")
    return np.array(labels.tolist())


def _warn_of_column() -> None:
    try:
        category = optional("sklearn.exceptions", "its error").DataConversionWarning
    except ImportError:
        category = UserWarning
    message = "A column-vector y was passed when a 1d array was expected: y (n, 1) is treated as (n,)"
    warnings.warn(message, category, stacklevel=4)


def hold_out(labels: Shaped[np.ndarray, " n"], share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Stratified training and validation indices; a class with one sample is trained on, others have both.

    >>> training, validation = hold_out(np.array([0, 0, 0, 0, 1, 1, 2]), 0.25, seed=0)
    >>> len(training), len(validation)
    (5, 2)
    """
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


def write_fitted(path: str | Path, kind: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file, atomically, with the facts as JSON in its metadata."""
    metadata = json.dumps({"kind": kind, "format": FORMAT, **facts}, allow_nan=False)
    saved = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_all({Path(path): save(saved, {"keyquery": metadata})})


def read_fitted(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of a file written by `write_fitted`; no code in it is executed."""
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


def label_facts(classes: Shaped[np.ndarray, " classes"]) -> dict[str, Any]:
    """Labels as JSON.

    >>> classes_of(label_facts(np.array([2, 5], dtype=np.int8)))
    array([2, 5], dtype=int8)
    """
    listed = classes.astype(str) if classes.dtype.kind == "M" else classes
    if classes.dtype.kind == "S":
        listed = np.char.decode(classes, "latin-1")
    return {"dtype": classes.dtype.str, "labels": listed.tolist()}


def classes_of(facts: dict[str, Any]) -> Shaped[np.ndarray, " classes"]:
    """Labels from the JSON of `label_facts`."""
    if not re.fullmatch(r"[<>|=]?[a-zA-Z]\d{0,6}(\[\w{1,8}\])?", str(facts["dtype"])):  # numpy would parse it as Python
        raise ValueError("labels cannot have this dtype")
    dtype, listed = np.dtype(str(facts["dtype"])), np.array(facts["labels"])
    if dtype.kind not in LABELS or dtype.itemsize > max(listed.itemsize, 4 * LETTERS):
        raise ValueError(f"labels cannot be of dtype {dtype}")
    labels = np.char.encode(listed, "latin-1").astype(dtype) if dtype.kind == "S" else listed.astype(dtype)
    if labels.ndim != 1 or len(np.unique(labels)) != len(labels):
        raise ValueError("labels must be a list without duplicates")
    return labels


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Seed torch's generators, and restore them afterwards; they are global, so threads take turns.

    >>> before = torch.get_rng_state()
    >>> with seeded(0, "cpu"):
    ...     x = torch.randn(3)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    with SEEDED, torch.random.fork_rng([torch.device(device)] if device.startswith("cuda") else []):
        torch.manual_seed(seed)
        yield
