"""What TransportClassifier says of input that it cannot use: one sentence, and nothing is changed."""

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

import keyquery as kq

NAN = float("nan")
X = np.random.default_rng(0).normal(size=(12, 2))
Y = np.arange(12) % 2


def small(**options):
    return kq.TransportClassifier(**{"epochs": 2, "random_state": 0, "device": "cpu", **options})


@pytest.mark.parametrize(
    ("given", "y", "said"),
    [
        (X, ["a"] * 12, "y holds only one class, 'a': a classifier needs two or more"),
        (X, Y[:3], r"inconsistent numbers of samples: \[12, 3\]"),
        (X, None, "TransportClassifier requires y to be passed, but the target y is None"),
        (np.where(X > 1, NAN, X), Y, r"X must be finite; \d+ of 12 points hold NaN, the first in sample \d+"),
        (np.where(X > 1, np.inf, X), Y, "column '0' of X holds infinity"),
        ([X, np.where(X > 1, NAN, X)], [0, 1], "X must be finite; .* of 24 points hold NaN, the first in sample 1"),
        (X[:0], [], "X has no rows"),
        ([["a", 1.0]] * 12, Y, "X must be numeric, but column '0' holds categories: encode them as numbers"),
        ([[1e200], [-1e200]], [0, 1], "X holds values too large to be standardised"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_data(given, y, said):
    model = small()
    with pytest.raises(ValueError, match=said):
        model.fit(given, y)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        check_is_fitted(model)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"geometry": "cirle"}, ValueError, "geometry must be one of 'circle', .* did you mean 'circle'?"),
        ({"match": "exact"}, ValueError, "match must be one of 'ot', 'random', 'mean', got 'exact'"),
        ({"hidden": 32}, TypeError, "hidden must be a sequence of integers, got 32"),
        ({"hidden": (32, 0)}, ValueError, "hidden must be at least 1, got 0"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"random_state": -1}, ValueError, "random_state must be None, an integer ≥ 0 or a numpy generator"),
        ({"device": "tpu"}, ValueError, "device"),
    ],
    ids=str,
)
@pytest.mark.unchecked
def test_parameters(options, error, said):
    with pytest.raises(error, match=said):
        small(**options).fit(X, Y)


def test_what_is_wrong_at_predict_leaves_the_fit_as_it_was():
    frame = pd.DataFrame(X, columns=["a", "b"])
    model = small().fit(frame, Y)
    before = model.predict_proba(frame)
    wrong = {
        "X has 3 features, but TransportClassifier is expecting 2 features": np.ones((2, 3)),
        "X has 1 features, but TransportClassifier is expecting 2": np.ones((2, 5, 1)),
        "Feature names unseen at fit time:\n- c": frame.rename(columns={"b": "c"}),
        "Feature names must be in the same order": frame[["b", "a"]],
        "X must be finite": frame.assign(a=NAN),
        "X holds values too large: up to .* standard deviations": frame.assign(a=1e200),
    }
    for said, given in wrong.items():
        with pytest.raises(ValueError, match=said):
            model.predict(given)
    with pytest.warns(UserWarning, match="X does not have valid feature names, but TransportClassifier was fitted"):
        assert np.array_equal(model.predict_proba(X), before)
    with pytest.raises(AttributeError, match="This TransportClassifier instance is not fitted yet"):
        small().predict(X)


def test_files_that_are_no_such_classifier(tmp_path):
    path = tmp_path / "a.safetensors"
    small().fit(X, Y).save(path)
    tensors = load_file(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        kq.TransportClassifier.load(tmp_path / "none")
    with pytest.raises(ValueError, match="is not a saved SeriesClassifier"):
        kq.SeriesClassifier.load(path)
    with safe_open(path, "pt") as file:
        said = file.metadata()
    for name, changed in {
        "mean or scale holds NaN or infinity": {"mean": tensors["mean"] * NAN},
        "and scale above 0": {"scale": 0 * tensors["scale"]},
        "layers.0.weight does not match a network with these parameters": {"network.layers.0.weight": torch.ones(3, 2)},
        "centres does not match a network with these parameters": {"network.centres": torch.ones(5, 2)},
    }.items():
        save_file({**tensors, **changed}, path, said)
        with pytest.raises(ValueError, match=f"is not a complete TransportClassifier file: .*{name}"):
            kq.TransportClassifier.load(path)
