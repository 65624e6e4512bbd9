"""What scikit-learn asks of an estimator, and what it does with one."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from inspect import signature

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted

import keyquery as kq
from keyquery.learn import fitting
from keyquery.learn.base import seed_of
from keyquery.learn.training import train

SMALL = {"width": 8, "heads": 2, "depth": 1, "device": "cpu"}


def slopes(count, length=16, seed=0):
    """Series that rise, and series that fall."""
    rng = np.random.default_rng(seed)
    up = rng.normal(size=(count, length)) / 2 + np.linspace(-2, 2, length)
    return np.concatenate((up, -up)), np.repeat(["up", "down"], count)


def test_clones_are_unfitted_and_alike_and_pickles_fitted():
    X, y = slopes(6)
    model = kq.SeriesClassifier(**SMALL, epochs=2, eta=0.3, random_state=1).fit(X, y)
    assert is_classifier(model)
    check_is_fitted(model)
    twin, again = clone(model), pickle.loads(pickle.dumps(model))
    assert twin.get_params() == model.get_params()
    with pytest.raises(NotFittedError, match="This SeriesClassifier instance is not fitted yet"):
        twin.predict(X)
    for same in (twin.fit(X, y), again):
        assert np.array_equal(same.predict_proba(X), model.predict_proba(X))
    assert repr(again) == repr(model)


def test_without_scikit_learn_the_extra_is_named_and_all_else_works():
    code = """
import sys
sys.modules["sklearn"] = None
import keyquery as kq, keyquery.cli
from importlib import import_module
from keyquery.kinds import KINDS
for kind in KINDS.values():
    import_module(kind.module)
for name in ("SeriesClassifier", "AffinityReranker"):
    try:
        getattr(kq, name)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == 2 * "an estimator needs scikit-learn: pip install 'keyquery[estimators]'\n"


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


def pairs(count=12):
    """Dark and light images, and their texts."""
    light = np.arange(count) % 2
    return np.broadcast_to(light[:, None, None] * 0.8, (count, 8, 8)), [("dark", "light")[place] for place in light]


NPT = {"embedding": 4, "depth": 2, "heads": 2, "random_state": 0, "device": "cpu"}
EVENTS = np.array(list("abab") * 6), np.tile([0.0, 1.0, 3.0, 4.0], 6), np.repeat(np.arange(6), 4)
FITS = {  # an estimator, its training data, and a prediction
    "events": (kq.EventModel(width=8, epochs=50, batch_size=1, random_state=0, device="cpu"), EVENTS, "predict_proba"),
    "transport": (kq.TransportClassifier(epochs=50, random_state=0, device="cpu"), slopes(12), "predict_proba"),
    "series": (kq.SeriesClassifier(**SMALL, epochs=50, random_state=0), slopes(12), "predict_proba"),
    "npt": (kq.NPTClassifier(**NPT, steps=120), (slopes(12)[0][:, :2], slopes(12)[1]), "predict_proba"),
    "regressor": (kq.NPTRegressor(**NPT, steps=120), (np.eye(24)[:, :2], np.arange(24.0)), "predict"),
    "parser": (kq.VisualParser(8, 4, 8, 1, 2, 1, batch_size=4, epochs=50, device="cpu"), pairs(), "match"),
    "reranker": (
        kq.Reranker(anchors=8, width=8, heads=2, steps=200, random_state=0, device="cpu"),
        (np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) // 4),
        "rerank",
    ),
}


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where tests run in the background, where a shell has it ignored."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("checks", [0, 2])
def test_the_first_interrupt_keeps_the_best_weights_so_far(name, checks, monkeypatch):
    model, data, use = FITS[name]
    states = {}

    def interrupted(network, draw, loss, recipe, **options):
        def pressed(step, generator):
            if step == checks * recipe.check_every + 1:
                signal.raise_signal(signal.SIGINT)
            states[step] = {key: tensor.clone() for key, tensor in network.state_dict().items()}
            return draw(step, generator)

        return train(network, pressed, loss, recipe, **options)

    monkeypatch.setattr(fitting, "train", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.warns(UserWarning, match=r"interrupted after step \d+ of \d+: the (best|last) weights") as seen:
        model = clone(model).fit(*data)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(model.history_) == checks
    message = str(seen[-1].message)
    if best := re.search(r"so far, of step (\d+)", message):
        assert checks, "there was no validation"
        kept = model.network_.state_dict()
        assert all(torch.equal(kept[key], tensor) for key, tensor in states[int(best[1])].items())
    inputs = (data[0][:3], data[0]) if use == "rerank" else data if name in ("parser", "events") else data[:1]
    predicted = getattr(model, use)(*inputs)
    assert all(np.isfinite(part).all() for part in (predicted if use == "rerank" else [predicted]))


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_raises_and_threads_are_left_alone():
    seen = []

    def twice():
        with fitting.first_interrupt_stops() as stopped:
            os.kill(os.getpid(), signal.SIGINT)
            seen.append(stopped())
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()

    def work():
        with fitting.first_interrupt_stops() as stopped:
            seen.append(stopped())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True, False]


def test_verbose_prints_lines_outside_a_terminal(capsys):
    for name, (model, data, _) in FITS.items():
        short = {"steps": 2} if "steps" in model.get_params() else {"epochs": 2}
        clone(model).set_params(**short, verbose=True).fit(*data)
        first = capsys.readouterr().err.splitlines()[0]
        validated = "" if name in ("parser", "reranker") else r", validation [\d.]+.*"
        assert re.fullmatch(rf"step \d+ of \d+: loss [\d.]+{validated}", first), name
        clone(model).set_params(**short).fit(*data)
        assert capsys.readouterr().err == ""


def test_long_predictions_show_progress(monkeypatch, capsys):
    monkeypatch.setattr("keyquery.support.progress.SECONDS", 0.0)
    series, names = slopes(6)
    frozen = clone(FITS["parser"][0]).set_params(frozen=True, epochs=1, verbose=True).fit(*pairs())
    shown = capsys.readouterr().err
    assert "features of images: 0 of 1" in shown
    assert "training: 0 of 3" in shown
    frozen.match(*pairs(), crossed=True)
    assert "matching: 0 of 1" in capsys.readouterr().err
    for model, text in (
        (kq.SeriesClassifier(**SMALL, epochs=1, random_state=0), "predicting: 0 of "),
        (kq.ConvolutionRidgeClassifier(features=336, random_state=0, device="cpu"), "convolutions: 0 of "),
    ):
        model.fit(series, names).set_params(verbose=True).predict(series)
        assert text in capsys.readouterr().err
    events = kq.EventModel(width=8, epochs=1, validation_fraction=0, device="cpu").fit(*EVENTS)
    events.set_params(verbose=True).evaluate(*EVENTS)
    assert "evaluating: 0 of 1" in capsys.readouterr().err
    events.sample(*EVENTS, n=2, random_state=0)
    assert "sampling: 1 of 2" in capsys.readouterr().err


def test_metadata_is_routed_through_pipelines():
    X, y = slopes(12)
    weights = np.r_[np.ones(12), np.full(12, 3.0)]
    with config_context(enable_metadata_routing=True):
        model = kq.TransportClassifier(epochs=10, random_state=0, device="cpu")
        model.set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        line = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        scores = cross_val_score(line, X, y, cv=2, params={"sample_weight": weights}, error_score="raise")
        assert np.isfinite(scores).all()


def table(rows=40, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": rng.normal(size=rows), "width": rng.normal(size=rows)})
    return frame, np.where(frame["size"] > 0, "yes", "no")


SMALL_TABLES = [
    kq.NPTClassifier(embedding=4, depth=2, heads=2, steps=5, random_state=0, device="cpu"),
    kq.TransportClassifier(epochs=2, random_state=0, device="cpu"),
]


@pytest.mark.parametrize("model", SMALL_TABLES, ids=["npt", "transport"])
@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_frames_that_a_pipeline_sets_as_output_are_read(model, kind):
    X, y = table()
    labels = pytest.importorskip("polars").Series(y) if kind == "polars" else y
    line = make_pipeline(StandardScaler(), clone(model)).set_output(transform=kind).fit(X, labels)
    assert list(line[-1].feature_names_in_) == ["size", "width"]
    plain = make_pipeline(StandardScaler(), clone(model)).fit(X, y)
    assert np.array_equal(line.predict_proba(X), plain.predict_proba(X))
    with config_context(transform_output=kind):
        assert np.array_equal(make_pipeline(StandardScaler(), clone(model)).fit(X, y).predict(X), line.predict(X))


def test_weights_of_tables_decide_what_is_learned():
    """Every row is there twice, once with the opposite label: the heavier of the two decides."""
    X, y = table(30)
    both, labels = pd.concat([X, X]), np.concatenate([y, np.where(y == "yes", "no", "yes")])
    model = kq.NPTClassifier(embedding=8, depth=2, heads=2, steps=30, random_state=0, device="cpu")
    right = model.fit(both, labels, sample_weight=np.repeat([1.0, 0.0], 30))
    alone = kq.NPTClassifier(**model.get_params()).fit(X, y)
    assert np.array_equal(right.predict_proba(X), alone.predict_proba(X))  # rows of weight 0 are left out
    assert set(right.context_rows_) <= set(range(30))
    heavy = model.fit(both, labels, sample_weight=np.repeat([0.05, 1.0], 30)).predict_proba(X)
    light = model.fit(both, labels, sample_weight=np.repeat([1.0, 0.05], 30)).predict_proba(X)
    of_yes = list(model.classes_).index("yes")
    assert (light - heavy)[y == "yes", of_yes].mean() > 0.2


def test_weights_of_classes_and_of_values():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 1)), np.repeat(["often", "seldom"], [54, 6])
    small = {"embedding": 4, "depth": 2, "heads": 2, "steps": 40, "random_state": 0, "device": "cpu"}
    plain = kq.NPTClassifier(**small).fit(X, y).predict_proba(X)[:, 1].mean()
    balanced = kq.NPTClassifier(**small, class_weight="balanced").fit(X, y).predict_proba(X)[:, 1].mean()
    assert plain < 0.3
    assert balanced > plain + 0.15
    values, noise = np.repeat([0.0, 1.0], 30), np.zeros((60, 1))
    high = kq.NPTRegressor(**small).fit(noise, values, sample_weight=np.repeat([1.0, 9.0], 30)).predict(noise[:1])
    low = kq.NPTRegressor(**small).fit(noise, values, sample_weight=np.repeat([9.0, 1.0], 30)).predict(noise[:1])
    assert high > low + 0.3
    with pytest.raises(ValueError, match=r"[Ss]ample.weight"):
        kq.NPTRegressor(**small).fit(noise, values, sample_weight=np.zeros(60))


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
