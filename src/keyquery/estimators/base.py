"""What all estimators share: parameters as scikit-learn knows them, seeds, labels, and a file of their own.

scikit-learn itself is not needed: an estimator is one by what it can do, not by whom it descends from.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
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

from keyquery.reading import plain
from keyquery.support.bounded_json import parse_json
from keyquery.support.checks import check_count, check_number
from keyquery.support.extras import optional
from keyquery.support.files import write_all
from keyquery.support.printable import brief

FORMAT = 1
LABELS = {"i": "number", "u": "number", "f": "number", "b": "bool", "U": "text", "S": "bytes", "M": "date"}
LETTERS = 1024  # that a label of a file may have room for, though none is so long
SEEDED = RLock()  # torch's generators belong to the whole process
Fitted = TypeVar("Fitted", bound="Estimator")
Network = TypeVar("Network", bound=nn.Module)


class NotFittedError(ValueError, AttributeError):
    """The estimator has learned nothing yet."""


class Estimator:
    """Parameters are the arguments of the constructor, kept as they were given; what is learned ends in `_`.

    >>> class Mean(Estimator):
    ...     def __init__(self, share=0.5, verbose=False):
    ...         self.share, self.verbose = share, verbose
    >>> Mean(share=0.1).set_params(verbose=True)
    Mean(share=0.1, verbose=True)
    """

    _estimator_type: ClassVar[str]  # how scikit-learn before 1.6 tells a classifier
    params_: dict[str, Any]  # those of the fit

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        found = list(signature(cls.__init__).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in found}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name; `deep` is for those that hold estimators, which none here does."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self: Fitted, **params: Any) -> Fitted:
        """Change parameters, for the next fit."""
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
        given = [f"{name}={brief(value)}" for name, value in params if repr(value) != repr(known[name])]
        return f"{type(self).__name__}({', '.join(given)})"

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: networks on the processor, so that they can be read where there is no GPU."""
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
        """Parameters as JSON holds them, for `params_`: what is set after a fit is for the next one.

        A generator of seeds is no plain fact.
        """
        params = plain(self.get_params())
        state = params["random_state"]
        return {**params, "random_state": state if isinstance(state, int) else None, "device": str(params["device"])}

    def _keep_columns(self, names: Sequence[str] | None, count: int) -> None:
        """How many columns a table has, and what they are called where it says so, as scikit-learn keeps it."""
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


def check_sizes(estimator: Estimator, counts: Sequence[str], **most: float) -> None:
    """Require parameters `counts` to be integers from 1 on, and the others numbers from 0 to below what is given.

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
    """A seed below 2²⁰ out of None, a number, or a generator of numpy's, from which one is drawn.

    Numbers from 2²⁰ on, which the training loop has no seeds for, are scattered over those below it.

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
        raise ValueError(f"random_state must be None, a number from 0 on or a generator, got {random_state!r}")
    number = int(random_state)
    return number if number < most else int(np.random.default_rng(number).integers(most))


def labels_of(name: str, y: Any, count: int, what: str = "y", of: str = "X") -> Shaped[np.ndarray, " n"]:
    """Class labels (n,), checked: one for each of `count` samples, none missing, no fractions.

    `what` and `of` are what an estimator calls labels and samples.

    >>> labels_of("SeriesClassifier", ["up", "down"], 2).tolist()
    ['up', 'down']
    """
    if y is None:
        raise ValueError(f"{name} requires {what} to be passed, but the target {what} is None: give one label a sample")
    labels = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    if isinstance(y, (list, tuple)) and labels.ndim == 1:
        labels = np.fromiter(y, dtype=object, count=len(y))  # numpy would make text of what is no number
    if labels.ndim == 2 and labels.shape[1] == 1:
        _warn_of_column()
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(f"{what} must be (n,), one label a sample, got shape {labels.shape}")
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
    """Targets (n,) that are numbers, checked: one for each of `count` samples, all finite.

    >>> numbers_of("NPTRegressor", [1, 2.5], 2)
    array([1. , 2.5])
    """
    if y is None:
        raise ValueError(f"{name} requires y to be passed, but the target y is None: give one number a sample")
    numbers = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        _warn_of_column()
        numbers = numbers[:, 0]
    if numbers.ndim != 1:
        raise ValueError(f"y must be (n,), one number a sample, got shape {numbers.shape}")
    if len(numbers) != count:
        raise ValueError(f"y must have a number for each of the {count} samples of X, got {len(numbers)}")
    if np.ma.is_masked(y):
        raise ValueError("y must have a number for every sample, got masked ones")
    try:
        found = numbers.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"y must hold numbers, got {numbers.dtype} such as {numbers.tolist()[0]!r}") from None
    if numbers.dtype.kind == "c" or not np.isfinite(found).all():
        raise ValueError("y must have a finite number for every sample, got NaN, infinity or complex ones")
    return found


def is_missing(value: Any) -> bool:
    """Whether a value stands for none: None, NaN, or pandas' NA and NaT.

    >>> is_missing(float("nan")), is_missing("nan")
    (True, False)
    """
    return (
        value is None or type(value).__name__ == "NAType" or bool(value != value)
    )  # NA equals nothing, not even False


def _of_one_type(labels: Shaped[np.ndarray, " n"], what: str) -> Shaped[np.ndarray, " n"]:
    """Labels of an array of objects as an array of their own type."""
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
    said = "A column-vector y was passed when a 1d array was expected: y (n, 1) is taken as (n,)"
    warnings.warn(said, category, stacklevel=4)


def hold_out(labels: Shaped[np.ndarray, " n"], share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which samples to learn from and which to hold out, class by class; a class of one is learned from.

    Of a class of two or more at least one is held out, and at least one is not.

    >>> learned, held = hold_out(np.array([0, 0, 0, 0, 1, 1, 2]), 0.25, seed=0)
    >>> len(learned), len(held)
    (5, 2)
    """
    generator, held = np.random.default_rng(seed), np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        if share > 0 and len(members) > 1:
            held[members[: min(max(round(share * len(members)), 1), len(members) - 1)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def filled(build: Callable[[], Network], weights: Mapping[str, Tensor], depth: int) -> Network:
    """A network with these weights; it is built when their shapes are known to be its own, and no sooner.

    So a small file that names huge sizes costs nothing.
    """
    if depth > len(weights):
        raise ValueError(f"a network of depth {depth} has more than {len(weights)} tensors")
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in build().state_dict().items()}
    for name in sorted(shapes.keys() | weights.keys()):
        if name not in shapes or name not in weights or shapes[name] != weights[name].shape:
            raise ValueError(f"{name} is not what a network of these parameters has")
    if broken := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise ValueError(f"{broken[0]} holds NaN or infinity")
    with seeded(0, "cpu"):
        network = build()
    network.load_state_dict(weights)
    return network.eval()


def write_fitted(path: str | Path, kind: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """An estimator as one safetensors file, its facts as JSON in the metadata; whole or not at all."""
    said = json.dumps({"kind": kind, "format": FORMAT, **facts}, allow_nan=False)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_all({Path(path): save(kept, {"keyquery": said})})


def read_fitted(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of a file that `write_fitted` wrote; nothing in it is run."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            facts = parse_json((file.metadata() or {}).get("keyquery", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is no whole file of an estimator: {error}") from None
    if not isinstance(facts, dict) or facts.pop("kind", None) != kind:
        raise ValueError(f"{path} is no saved {kind}")
    if (version := facts.pop("format", None)) != FORMAT:
        raise ValueError(f"{path} is of format {version!r}; this version reads {FORMAT}")
    return facts, tensors


def label_facts(classes: Shaped[np.ndarray, " classes"]) -> dict[str, Any]:
    """Labels as JSON holds them.

    >>> classes_of(label_facts(np.array([2, 5], dtype=np.int8)))
    array([2, 5], dtype=int8)
    """
    listed = classes.astype(str) if classes.dtype.kind == "M" else classes
    if classes.dtype.kind == "S":
        listed = np.char.decode(classes, "latin-1")
    return {"dtype": classes.dtype.str, "labels": listed.tolist()}


def classes_of(facts: dict[str, Any]) -> Shaped[np.ndarray, " classes"]:
    """Labels that `label_facts` wrote."""
    if not re.fullmatch(r"[<>|=]?[a-zA-Z]\d{0,6}(\[\w{1,8}\])?", str(facts["dtype"])):  # numpy would parse it as Python
        raise ValueError("labels cannot be of such a dtype")
    dtype, listed = np.dtype(str(facts["dtype"])), np.array(facts["labels"])
    if dtype.kind not in LABELS or dtype.itemsize > max(listed.itemsize, 4 * LETTERS):
        raise ValueError(f"labels cannot be of dtype {dtype}")
    made = np.char.encode(listed, "latin-1").astype(dtype) if dtype.kind == "S" else listed.astype(dtype)
    if made.ndim != 1 or len(np.unique(made)) != len(made):
        raise ValueError("labels must be a list, each of them once")
    return made


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """With torch's generators at `seed`, and afterwards as they were.

    The generators belong to the whole process: threads take turns here, so that each has the numbers of its own seed.

    >>> before = torch.get_rng_state()
    >>> with seeded(0, "cpu"):
    ...     x = torch.randn(3)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    with SEEDED, torch.random.fork_rng([torch.device(device)] if device.startswith("cuda") else []):
        torch.manual_seed(seed)
        yield
