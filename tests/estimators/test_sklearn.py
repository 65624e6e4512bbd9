"""What scikit-learn asks of an estimator, and what it does with one."""

import pickle
import re
import signal
import subprocess
import sys
from importlib import import_module
from inspect import signature

import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted

import keyquery as kq
from keyquery.estimators.base import Estimator, seed_of

SMALL = {"width": 8, "heads": 2, "depth": 1, "device": "cpu"}
# Checks that cannot hold of series, and why.
ANY_LENGTH = "a row of X is a series of any length, so that there is no number of features"
REPEATED = "a series of weight 2 is drawn once per epoch or threshold, two copies twice, and may be held out"
NOT_FOR_SERIES = {
    "check_n_features_in": ANY_LENGTH,
    "check_n_features_in_after_fitting": ANY_LENGTH,
    "check_classifiers_train": ANY_LENGTH + ": all else of this check is tested in test_series",
    "check_methods_subset_invariance": "it wants 1e-7, and the network computes in float32",
    "check_sample_weight_equivalence_on_dense_data": REPEATED,
}
NOT_FOR_RIDGE = {name: NOT_FOR_SERIES[name] for name in NOT_FOR_SERIES if name != "check_methods_subset_invariance"}


def slopes(count, length=16, seed=0):
    """Series that rise, and series that fall."""
    rng = np.random.default_rng(seed)
    up = rng.normal(size=(count, length)) / 2 + np.linspace(-2, 2, length)
    return np.concatenate((up, -up)), np.repeat(["up", "down"], count)


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (kq.SeriesClassifier(**SMALL, epochs=6, batch_size=64, lr=0.02, random_state=0), NOT_FOR_SERIES),
        (kq.ConvolutionRidgeClassifier(features=168, random_state=0, device="cpu"), NOT_FOR_RIDGE),
    ],
)
def test_series_pass_the_checks_of_scikit_learn(model, expected, monkeypatch):
    monkeypatch.setattr("keyquery.estimators.series.classifier.BATCHES", 1)
    found = check_estimator(model, expected_failed_checks=expected, on_fail=None)
    assert [(one["check_name"], one["exception"]) for one in found if one["status"] == "failed"] == []
    assert {one["check_name"] for one in found if one["status"] == "xfail"} <= set(expected)
    assert sum(one["status"] == "passed" for one in found) > 40


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize("kind", [kq.NPTClassifier, kq.NPTRegressor])
def test_tables_pass_the_checks_of_scikit_learn(kind):
    model = kind(embedding=4, depth=2, heads=2, steps=100, random_state=0, device="cpu")
    repeated = {"check_sample_weight_equivalence_on_dense_data": REPEATED.replace("series", "row")}
    found = check_estimator(model, expected_failed_checks=repeated, on_fail=None)
    assert [(one["check_name"], one["exception"]) for one in found if one["status"] == "failed"] == []
    assert sum(one["status"] == "passed" for one in found) > 40


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize("geometry", ["circle", "simplex", "learned"])
def test_transport_passes_the_checks_of_scikit_learn(geometry):
    model = kq.TransportClassifier(geometry, epochs=20, random_state=0, device="cpu")
    repeated = {"check_sample_weight_equivalence_on_dense_data": REPEATED.replace("series", "sample")}
    found = check_estimator(model, expected_failed_checks=repeated, on_fail=None)
    assert [(one["check_name"], one["exception"]) for one in found if one["status"] == "failed"] == []
    assert sum(one["status"] == "passed" for one in found) > 50


@pytest.mark.slow
def test_it_walks_through_folds_grids_and_pipelines():
    X, y = slopes(12)
    model = kq.SeriesClassifier(**SMALL, epochs=10, lr=0.02, random_state=0)
    assert cross_val_score(model, X, y, cv=2).min() > 0.8
    grid = GridSearchCV(model, {"attention": ["psd", "primal"]}, cv=2).fit(X, y)
    assert grid.best_score_ > 0.8
    line = make_pipeline(FunctionTransformer(np.negative), model).fit(X, y)
    assert line.score(X, y) > 0.8
    assert line.score(-X, y) < 0.2


def test_clones_are_unfitted_and_alike():
    X, y = slopes(6)
    model = kq.SeriesClassifier(**SMALL, epochs=2, eta=0.3, random_state=1).fit(X, y)
    assert is_classifier(model)
    check_is_fitted(model)
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    with pytest.raises(NotFittedError, match="This SeriesClassifier instance is not fitted yet"):
        twin.predict(X)
    assert np.array_equal(twin.fit(X, y).predict_proba(X), model.predict_proba(X))


def test_it_is_pickled():
    X, y = slopes(6)
    model = kq.SeriesClassifier(**SMALL, epochs=2, random_state=1).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
    assert repr(again) == repr(model)


def test_without_scikit_learn_the_extra_is_named_and_all_else_works():
    code = """
import sys
sys.modules["sklearn"] = None
import keyquery as kq, keyquery.cli
from importlib import import_module
from keyquery.reading import MODULES
for module in MODULES.values():
    import_module(module)
for name in ("SeriesClassifier", "AffinityReranker"):
    try:
        getattr(kq, name)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == 2 * "an estimator needs scikit-learn: pip install 'keyquery[estimators]'\n"


def test_parameters_are_those_of_the_constructor():
    class Mean(Estimator):
        def __init__(self, share=0.5, verbose=False):
            self.share, self.verbose = share, verbose

    assert Mean().get_params() == {"share": 0.5, "verbose": False}
    assert repr(Mean(share=0.5)) == "Mean()"
    model = Mean()
    with pytest.raises(ValueError, match=r"Invalid parameter 'shar' for estimator Mean\(\)"):
        model.set_params(shar=1)


def test_seeds():
    assert seed_of(3) == seed_of(np.int32(3)) == 3
    assert len({seed_of(seed) for seed in (0, 2**20, 2**21, 2**32, 10**30)}) == 5
    assert seed_of(2**20) == seed_of(2**20) < 2**20
    for make in (np.random.default_rng, np.random.RandomState):
        assert seed_of(make(0)) == seed_of(make(0)) != seed_of(make(1))
        state = make(0)
        assert seed_of(state) != seed_of(state)
    for wrong in (-1, 0.5, True, "0"):
        with pytest.raises(ValueError, match="random_state must be None, an integer ≥ 0 or a numpy generator"):
            seed_of(wrong)


@pytest.mark.parametrize(
    "model",
    [
        kq.TransportClassifier(epochs=50, random_state=0, device="cpu"),
        kq.SeriesClassifier(**SMALL, epochs=50, random_state=0),
    ],
)
def test_the_first_interrupt_keeps_the_best_weights_so_far(model, monkeypatch):
    module = import_module(type(model).__module__)
    fit_network, calls = module.fit_network, []

    def interrupted(*arguments, validate=None, **options):
        def third(network):
            calls.append(1)
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return validate(network)

        return fit_network(*arguments, validate=third, **options)

    monkeypatch.setattr(module, "fit_network", interrupted)
    X, y = slopes(12)
    with pytest.warns(UserWarning, match="training was interrupted after 3 validations: the best weights so far"):
        model.fit(X, y)
    assert len(model.history_) == 3
    assert np.isfinite(model.predict_proba(X)).all()


def test_verbose_prints_lines_outside_a_terminal(capsys):
    X, y = slopes(12)
    kq.TransportClassifier(epochs=2, random_state=0, device="cpu", verbose=True).fit(X, y)
    assert capsys.readouterr().err.startswith("validation 1: ")
    kq.NPTClassifier(embedding=4, depth=2, heads=2, steps=2, device="cpu", verbose=True).fit(X[:, :2], y)
    assert "validation 1: " in capsys.readouterr().err
    kq.TransportClassifier(epochs=2, random_state=0, device="cpu").fit(X, y)
    assert capsys.readouterr().err == ""


def test_metadata_is_routed_through_pipelines():
    X, y = slopes(12)
    weights = np.r_[np.ones(12), np.full(12, 3.0)]
    with config_context(enable_metadata_routing=True):
        model = kq.TransportClassifier(epochs=10, random_state=0, device="cpu")
        model.set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        line = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        scores = cross_val_score(line, X, y, cv=2, params={"sample_weight": weights}, error_score="raise")
        assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    "kind",
    [
        kq.ConvolutionRidgeClassifier,
        kq.EventModel,
        kq.InContextClassifier,
        kq.NPTClassifier,
        kq.NPTRegressor,
        kq.Reranker,
        kq.SeriesClassifier,
        kq.TransportClassifier,
        kq.VisualParser,
    ],
)
def test_the_same_things_have_the_same_names(kind):
    names = set(signature(kind).parameters)
    assert names >= {"random_state", "device", "verbose"}
    assert not names & {"holdout", "seed", "learning_rate", "n_epochs", "max_iter", "test_size"}
    lines = re.findall(r"^    (\w[\w, ]*)$", kind.__doc__, re.MULTILINE)
    assert names <= {name.strip() for line in lines for name in line.split(",")}
