"""What holds of every estimator that is trained: seeds, files, pickles and weights."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone

import keyquery as kq
from tests.learn.test_sklearn import FITS, slopes

RIDGE = (kq.ConvolutionRidgeClassifier(features=336, random_state=0, device="cpu"), slopes(12), "predict_proba")
ESTIMATORS = FITS | {"ridge": RIDGE}


def short(name):
    """An estimator that trains for two steps or epochs, its data, and a function of its predictions."""
    model, data, method = ESTIMATORS[name]
    sizes = {size: 2 for size in ("steps", "epochs") if size in model.get_params()}
    inputs = {"rerank": (data[0][:3], data[0]), "predict_proba": data if name == "events" else data[:1]}

    def predicted(fitted):
        outputs = getattr(fitted, method)(*inputs.get(method, data if name == "parser" else data[:1]))
        return np.concatenate(outputs) if method == "rerank" else outputs

    return clone(model).set_params(**sizes), data, predicted


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_same_seed_gives_the_same_and_leaves_torch_as_it_was(name):
    model, data, predicted = short(name)
    state = torch.get_rng_state()
    first, again, other = (predicted(clone(model).set_params(random_state=seed).fit(*data)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_files_and_pickles_hold_what_was_fitted(name, tmp_path):
    model, data, predicted = short(name)
    expected, path = predicted(model.fit(*data)), tmp_path / "model.safetensors"
    model.save(path)
    for again in (type(model).load(path, device="cpu"), pickle.loads(pickle.dumps(model))):
        assert again.get_params() == model.get_params()
        assert again.history_ == model.history_
        assert np.array_equal(predicted(again), expected)


@pytest.mark.parametrize("name", ["series", "ridge", "transport", "npt"])
def test_samples_of_weight_0_are_left_out_and_heavy_classes_are_predicted(name):
    model, options = (
        ESTIMATORS[name][0],
        {"series": {"epochs": 4, "lr": 1e-2}, "transport": {"epochs": 5}, "npt": {"steps": 20}},
    )
    rng = np.random.default_rng(0)
    X, y, kept = rng.normal(size=(60, 12)), np.arange(60) % 2, np.arange(60) % 5 > 0  # nothing to learn
    model = clone(model).set_params(**options.get(name, {}))
    weighted = clone(model).fit(X, y, sample_weight=kept.astype(float))
    assert np.array_equal(weighted.predict_proba(X), clone(model).fit(X[kept], y[kept]).predict_proba(X))
    heavy = clone(model).set_params(class_weight={0: 1, 1: 20}).fit(X, y)
    assert heavy.predict_proba(-X)[:, 1].mean() > weighted.predict_proba(-X)[:, 1].mean() + 0.1
