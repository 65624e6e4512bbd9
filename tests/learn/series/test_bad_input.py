"""What SeriesClassifier says of input that it cannot use: one sentence, and nothing is changed."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

import keyquery as kq
from keyquery.learn.inputs.sequences import Padded
from keyquery.learn.series.training import Labelled, temperature_of

NAN = float("nan")
GOOD = np.arange(20.0).reshape(5, 4)
LABELS = ["a", "b", "a", "b", "a"]
MISSING = "y must have a value in every row, got None, NaN or infinity in 1 of 5 rows, the first of them row 4"


def small(**options):
    return kq.SeriesClassifier(**{"width": 8, "heads": 2, "depth": 1, "epochs": 1, "device": "cpu", **options})


@pytest.mark.parametrize(
    ("X", "y", "said"),
    [
        (GOOD, LABELS[:4], r"inconsistent numbers of samples: \[5, 4\]"),
        (GOOD, ["a"] * 5, "y holds only one class, 'a': a classifier needs two or more"),
        (GOOD, None, "requires y to be passed, but the target y is None"),
        (GOOD, [0.1, 0.2, 0.3, 0.4, 0.5], "Unknown label type: y must hold .*, got float64 such as 0.1"),
        (GOOD, [0, 1, 0, 1, NAN], MISSING),
        (GOOD, np.array(["2020", "2021", "2020", "2021", "NaT"], "M8[Y]"), MISSING),
        (GOOD, pd.Series(["a", "b", "a", "b", None], dtype="string"), MISSING),
        (GOOD, np.ma.masked_array([0, 1, 0, 1, 0], [0, 0, 0, 0, 1]), MISSING),
        (GOOD, ["a", 1, "a", "b", "a"], "y must hold labels of one type, got int, str"),
        (GOOD, np.ones((5, 2)), r"y should be a 1d array, got an array of shape \(5, 2\)"),
        (GOOD[0], LABELS, r"or a list of series, got shape \(4,\). Reshape your data"),
        (np.ones((2, 3, 4, 5)), ["a", "b"], r"or a list of series, got shape \(2, 3, 4, 5\)"),
        (Path("series.ts"), LABELS, "or a list of series, got .*Path"),
        ([1.0, 2.0], ["a", "b"], r"got shape \(\): a single series must be passed as \[X\]"),
        (np.full((2, 3), "NaT", "M8[s]"), ["a", "b"], r"nor dates and times: .* got datetime64\[s\]"),
        ([], [], "X holds no series"),
        ([[1.0, 2.0], []], ["a", "b"], r"series 1 of X has no values: .* in shape \(0, 1\)"),
        ([[1.0, 2.0], [NAN, NAN]], ["a", "b"], "series 1 of X has no values: all are NaN"),
        ([[1.0, 2.0], [np.inf, 0.0]], ["a", "b"], "series 1 of X holds infinity"),
        ([np.ones((3, 2)), np.ones((3, 1))], ["a", "b"], "the dims of the first, 2; series 1 has 1"),
        ([np.ones((3, 2, 1)), np.ones((3, 1))], ["a", "b"], r"series 0 of X must be \(length, dims\) or \(length,\)"),
        ([[1e200], [-1e200]], ["a", "b"], "X holds values too large to be standardised"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_data(X, y, said):
    model = small()
    with pytest.raises(ValueError, match=said):
        model.fit(X, y)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        check_is_fitted(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "primal++"}, "attention must be one of .*, got 'primal\\+\\+'; did you mean 'primal\\+'"),
        ({"width": 9}, "heads must divide width: 2 does not divide 9"),
        ({"rank": 5}, "rank must be at most 4"),
        ({"validation_fraction": 1.0}, "validation_fraction must be at least 0 and below 1, got 1.0"),
        ({"lr": NAN}, "lr must be finite"),
    ],
    ids=str,
)
def test_parameters_are_checked_at_fit(options, said):
    model = small(**options)  # as scikit-learn wants it, the constructor checks nothing
    with pytest.raises(ValueError, match=said):
        model.fit(GOOD, LABELS)


def test_sparse_tensors_are_refused():
    with pytest.raises(TypeError, match=r"X is a sparse matrix; dense data is required: use X.to_dense\(\)"):
        small().fit(torch.from_numpy(GOOD).to_sparse(), LABELS)


@pytest.mark.parametrize("scale", [1e30, 1e300])
def test_values_too_large_at_predict(scale):
    model = small(random_state=0).fit(GOOD, LABELS)
    with pytest.raises(
        ValueError, match=r"X holds values too large: up to .* standard deviations of the training data"
    ):
        model.predict_proba(GOOD * scale)


def test_what_only_several_series_or_only_one_may_be():
    X = np.random.default_rng(0).normal(size=(5, 6, 2))
    model = small(random_state=0).fit(X, LABELS)
    for alone in (X[0], X[0].tolist()):
        with pytest.raises(ValueError, match=r"fitted on series of 2: pass a single series as \[X\]"):
            model.predict(alone)
    for several in (X, [X[0]], list(X)):
        with pytest.raises(ValueError, match="plot takes one series"):
            model.plot(several)


def test_predicting():
    model = small(random_state=0)
    with pytest.raises(ValueError, match="This SeriesClassifier instance is not fitted yet"):
        model.save("nowhere")
    model.fit(GOOD, LABELS)
    with pytest.raises(ValueError, match="X has 2 dims, but this SeriesClassifier was fitted on series of 1"):
        model.predict(np.ones((5, 4, 2)))
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples: \[5, 2\]"):
        model.score(GOOD, ["a", "b"])
    assert model.score(GOOD, ["new"] * 5) == 0  # a class that was not there in training is merely never right
    with pytest.raises(ValueError, match="stretch must be at least 1, got 0"):
        model.importance(GOOD, stretch=0)
    proba = model.predict_proba(GOOD)
    with pytest.raises(ValueError, match="only one class"):
        model.fit(GOOD, ["a"] * 5)
    assert np.array_equal(model.predict_proba(GOOD), proba)  # a fit that fails leaves the last one


def test_time_may_be_the_last_axis():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 9, 2)), np.arange(12) % 2
    sizes = {"width": 8, "heads": 2, "depth": 1, "epochs": 2, "random_state": 0, "device": "cpu"}
    expected = kq.SeriesClassifier(**sizes).fit(X, y).predict_proba(X)
    last = X.transpose(0, 2, 1)
    model = kq.SeriesClassifier(**sizes, axis=2)
    for same in (last, list(last)):
        assert np.array_equal(model.fit(same, y).predict_proba(same), expected)
    with pytest.warns(
        UserWarning, match=r"read as series of 2 steps and 9 dims; if it is \(n, dims, length\), set axis=2"
    ):
        kq.SeriesClassifier(**sizes).fit(last, y)


def test_probabilities_are_softened_where_the_validation_split_shows_them_too_sure():
    logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    samples = Labelled(
        Padded(torch.zeros(4, 1, 1), torch.ones(4, 1, dtype=torch.bool)), torch.tensor([0, 0, 0, 1]), torch.ones(4)
    )
    network = torch.nn.Module()
    network.forward = lambda values, real: logits
    # Three of four are right: the best temperature makes the probability 3/4, a logit of log 3.
    assert temperature_of(network, samples, 4) == pytest.approx(9 / np.log(3), rel=0.02)
    logits /= 100  # not sure enough: left as it is
    assert temperature_of(network, samples, 4) == 1


def test_channels_first_are_named_in_the_error():
    series = [np.ones((2, 9)), np.ones((2, 7))]  # (dims, length) of two lengths, as in aeon
    with pytest.raises(ValueError, match=r"series 1 has 7; if series are \(dims, length\), as in aeon, set axis=2"):
        small().fit(series, ["a", "b"])
    small(axis=2).fit(series, ["a", "b"])


def test_frames_of_polars_are_series():
    polars = pytest.importorskip("polars")
    X, y = np.random.default_rng(0).normal(size=(12, 8)), ["a", "b"] * 6
    expected = small(random_state=0).fit(X, y).predict_proba(X)
    lists = polars.Series([row.tolist() for row in X])
    frames = [polars.DataFrame({"x": row}) for row in X]
    for same in (polars.DataFrame(X), lists, frames):
        assert np.array_equal(small(random_state=0).fit(same, polars.Series(y)).predict_proba(same), expected)
    with pytest.raises(TypeError, match=r"lazy frame, whose rows are not known yet: pass X.collect\(\)"):
        small().fit(polars.DataFrame(X).lazy(), y)
